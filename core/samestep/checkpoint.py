"""What survives: checkpoints that exist whole or not at all, are verified when read, and hold no pickle.

A checkpoint is a folder ``<run-dir>/checkpoints/step-00000469/`` with one safetensors file for each group of arrays
(``model``, ``optimizer``) and ``manifest.json``, which holds the step, the small state (running sums, elapsed
seconds), the options that decide the arithmetic, and size and SHA-256 of every file; the manifest carries a SHA-256
of itself, so that one flipped bit anywhere is noticed. The folder is written beside its place, synced and renamed.

Rank 0 alone reads and writes; it broadcasts what it read, so no shared disk is assumed. What only computes (`bit_sum`,
`weights_sha256`, `mismatch`) every rank calls. A checkpoint whose ranks write a shard each is `sharded`'s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from samestep import FatalError, UserError, safetensors_writer
from samestep.safetensors_writer import Part, encode

Arrays = dict[str, NDArray[Any]]
FORMAT = 1
_MANIFEST = "manifest.json"
_disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_pending: Future[None] | None = None  # of the checkpoint that is not yet under its name
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(r"[a-z_]+(-\d{5,})?\.safetensors")


class Damaged(Exception):
    """This checkpoint cannot be used, and why."""


class OtherFormat(Damaged):
    """It may be good, but another version of this package wrote it."""


@dataclass(frozen=True)
class Checkpoint:
    """A good checkpoint. ``state`` and ``arithmetic`` are JSON values.

    ``contents`` has the verified bytes of each group's safetensors file; it is empty where the manifest alone was read.
    ``files`` and, of a sharded one, ``pieces`` are the manifest's.
    """

    folder: Path
    app: str
    step: int
    state: dict[str, Any]
    arithmetic: dict[str, Any]
    contents: dict[str, bytes]
    files: dict[str, dict[str, Any]]
    pieces: dict[str, Any]

    def arrays(self, group: str) -> Arrays:
        """The arrays of one group, by name. Raises FatalError when the file is not a safetensors file."""
        try:
            return safetensors.numpy.load(self.contents[group])
        except (KeyError, SafetensorError, ValueError, TypeError) as error:
            raise FatalError(f"checkpoint {self.folder}: {group}.safetensors cannot be read: {error}") from error


def save(
    run_dir: Path,
    app: str,
    step: int,
    groups: Mapping[str, Arrays],
    state: Mapping[str, Any],
    arithmetic: Mapping[str, Any],
    keep: int,
    spare: int | None = None,
) -> Path:
    """Write the checkpoint of ``step`` (updates done) and delete all but the ``keep`` newest, and that of ``spare``.

    Returns as soon as the operating system has the bytes, so the arrays may change. A thread waits for the disk, gives
    the checkpoint its name and deletes old ones: `finish` waits for that, and so does the next call.
    Raises FatalError when this or the checkpoint before cannot be written; earlier ones are then untouched.
    """
    finish()
    folder = folder_of(run_dir, step)
    temporary, written, files = temporary_of(folder), list[IO[bytes]](), {}
    try:
        clear(run_dir)
        temporary.mkdir(parents=True)
        for group, arrays in groups.items():
            written.append((temporary / f"{group}.safetensors").open("wb"))
            files[f"{group}.safetensors"] = write_file(written[-1], encode(arrays))
        body = {"format": FORMAT, "app": app, "step": step, "files": files}
        seal(folder, written, {**body, "state": dict(state), "arithmetic": dict(arithmetic)}, keep, spare)
    except OSError as error:
        raise not_written(folder, written, error) from error
    return folder


def seal(folder: Path, written: list[IO[bytes]], body: Mapping[str, Any], keep: int, spare: int | None) -> None:
    """Give the files ``written`` a manifest and, in a thread, their place; see `save`. Raises OSError."""
    global _pending
    content = _canonical(body)
    digest = hashlib.sha256(content).hexdigest().encode()
    written.append((temporary_of(folder) / _MANIFEST).open("wb"))
    write_file(written[-1], [b'{"manifest": %b,\n "sha256": "%b"}' % (content, digest)])
    _pending = _disk.submit(_commit, folder, written, keep, spare)


def finish() -> None:
    """Wait until the checkpoint given to `save` is on the disk under its name, and old ones are deleted.

    Raises FatalError when it cannot be written.
    """
    global _pending
    pending, _pending = _pending, None
    if pending:
        pending.result()


def _commit(folder: Path, written: Sequence[IO[bytes]], keep: int, spare: int | None) -> None:
    """What of `save` takes the disk's time. A kill at any moment leaves whole checkpoints, the newest or the others."""
    temporary = temporary_of(folder)
    try:
        for file in written:
            os.fsync(file.fileno())
            file.close()
        sync_folder(temporary)
        if folder.exists():  # only a damaged one can be in the way: a good one would have been resumed from
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise not_written(folder, written, error) from error
    for old in folders(folder.parents[1])[keep:]:
        if int(old.name[5:]) == spare:
            continue
        with contextlib.suppress(OSError):
            shutil.rmtree(old.rename(temporary_of(old)))


def not_written(folder: Path, written: Sequence[IO[bytes]], error: OSError) -> FatalError:
    """For a checkpoint that is given up: closes its files, and deletes them."""
    for file in written:
        with contextlib.suppress(OSError):
            file.close()
    shutil.rmtree(temporary_of(folder), ignore_errors=True)
    return FatalError(f"cannot write checkpoint {folder}: {reason(error)}")


def clear(run_dir: Path) -> None:
    """Delete what a process that was killed left half-written, or half-deleted. Raises OSError."""
    for leftover in _entries(run_dir):
        if leftover.startswith(".step-") and leftover.endswith(".tmp"):
            shutil.rmtree(run_dir / "checkpoints" / leftover)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def temporary_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def folders(run_dir: Path) -> list[Path]:
    """The checkpoints' folders, newest first; half-written ones have other names."""
    found = [run_dir / "checkpoints" / entry for entry in _entries(run_dir) if _STEP_FOLDER.fullmatch(entry)]
    return sorted(found, key=lambda folder: int(folder.name[5:]), reverse=True)


def newest(
    run_dir: Path, warn: Callable[[str], None], verify: bool = True, reader: Callable[..., Checkpoint] | None = None
) -> Checkpoint | None:
    """The newest good checkpoint; None when the run dir has none at all. Without ``verify``, by manifests alone.

    ``reader`` is in the place of `read`, as is one that shares the work among ranks.
    Every damaged one that is newer is named through ``warn``. Raises FatalError, listing them, when there are
    checkpoints but none is good: starting again silently would throw the run away; UserError at one that another
    version of this package wrote.
    """
    damaged = []
    retired = [entry for entry in _entries(run_dir) if entry.startswith("unequal-")]
    for folder in folders(run_dir):
        try:
            found = (reader or read)(folder, verify)
        except OtherFormat as problem:  # an older one would make its steps again, and rename it
            raise UserError(
                f"checkpoint {folder} is of another version of samestep: {problem}: use that version, or start anew "
                "with --no-resume or another --run-dir"
            ) from problem
        except Damaged as problem:
            damaged.append(f"{folder.name} ({problem})")
            continue
        for text in damaged:
            warn(f"checkpoint {text} is damaged and skipped; using {found.folder.name}")
        return found
    if damaged or retired:
        raise FatalError(
            f"no checkpoint in {run_dir / 'checkpoints'} is good: {'; '.join([*damaged, *retired])}; "
            "restore one, or start anew with --no-resume or another --run-dir"
        )
    return None


def read(folder: Path, verify: bool = True) -> Checkpoint:
    """Read and verify one checkpoint; without ``verify`` its manifest and its files' sizes alone. Raises Damaged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        body = manifest["manifest"]
        if manifest["sha256"] != hashlib.sha256(_canonical(body)).hexdigest():
            raise Damaged(f"{_MANIFEST} does not match its own checksum")
        if body["format"] != FORMAT:
            raise OtherFormat(f"{_MANIFEST} has format {body['format']!r}, this program reads {FORMAT}")
        contents = {}
        for name, facts in body["files"].items():
            if not _FILE_NAME.fullmatch(name):  # a manifest must not lead out of its folder
                raise Damaged(f"{_MANIFEST} names the file {name!r}")
            size = (folder / name).stat().st_size
            if size != facts["size"]:
                raise Damaged(f"{name} has {size} bytes, not {facts['size']!r}")
            if not verify:
                continue
            content = (folder / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != facts["sha256"]:
                raise Damaged(f"{name} does not match its checksum")
            contents[name.removesuffix(".safetensors")] = content
        if folder.name != f"step-{body['step']:08d}":
            raise Damaged(f"{_MANIFEST} is of step {body['step']}")
        if not (isinstance(body["state"], dict) and isinstance(body["arithmetic"], dict)):
            raise Damaged(f"{_MANIFEST} lacks its state")
        its = body["state"], body["arithmetic"], contents, body["files"], body.get("pieces", {})
        return Checkpoint(folder, str(body["app"]), body["step"], *its)
    except OSError as error:
        raise Damaged(reason(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{_MANIFEST} is not what was written ({type(error).__name__})") from error


def retire(folder: Path, why: str) -> None:
    """Rename a checkpoint, "damaged" or "unequal", so that it is kept but no longer counted."""
    kept = folder.with_name(f"{why}-{folder.name}")
    shutil.rmtree(kept, ignore_errors=True)
    folder.rename(kept)


def weights_sha256(weights: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes of all arrays, in sorted name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.asarray(weights[name], order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(digest_line(name, array))
        digest.update(array.tobytes())
    return digest.hexdigest()


def digest_line(name: str, array: Any) -> bytes:
    """What `weights_sha256` has of an array before its bytes."""
    return f"{name} {array.dtype.name} {list(array.shape)}\n".encode()


def bit_sum(array: NDArray[Any]) -> int:
    """The sum, modulo 2**64, of an array's bytes taken as 32-bit words: any single bit that differs changes it.

    Words of half its width, so that signs that differ do not cancel. Many times as fast as SHA-256.
    """
    content = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    words = len(content) // 4 * 4
    rest = int.from_bytes(content[words:].tobytes(), "little")
    return (int(content[:words].view(np.uint32).sum(dtype=np.uint64)) + rest) % 2**64


def save_weights(path: Path, weights: Arrays) -> None:
    """Write a safetensors file whole or not at all, after the last checkpoint. Raises FatalError."""
    finish()
    try:
        write_atomic(path, *encode(weights))
    except OSError as error:
        raise FatalError(f"cannot write {path}: {reason(error)}") from error


def load_weights(path: Path) -> Arrays:
    """Read a safetensors file of weights. Raises UserError when it is missing or not one."""
    try:
        return safetensors.numpy.load(path.read_bytes())
    except OSError as error:
        raise UserError(f"--init-from {path}: {reason(error)}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--init-from {path} is not a readable safetensors file: {error}") from error


def mismatch(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first difference of arrays in names, shapes or dtypes, in words; None when ``given`` fits ``wanted``."""
    for name in sorted({*given, *wanted}):
        if name not in given:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is not part of it"
        if given[name].shape != wanted[name].shape:
            return f"{name} has shape {list(given[name].shape)}, not {list(wanted[name].shape)}"
        if given[name].dtype != wanted[name].dtype:
            return f"{name} is {given[name].dtype}, not {wanted[name].dtype}"
    return None


def write_atomic(path: Path, *content: Part) -> None:
    """Write a file beside its place, sync it and rename it. Raises OSError; nothing partial is left."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _entries(run_dir: Path) -> list[str]:
    try:
        return os.listdir(run_dir / "checkpoints")
    except (FileNotFoundError, NotADirectoryError):
        return []


def write_file(file: IO[bytes], parts: Sequence[Part]) -> dict[str, Any]:
    """Write the parts, have the disk begin with them, and return their size and SHA-256, made at the same time."""
    digest, size = hashlib.sha256(), sum(len(part) for part in parts)

    def checksum() -> None:
        for part in parts:
            digest.update(part)

    if size <= safetensors_writer.SMALL:
        file.writelines(parts)
        _have_written(file, 0)
        checksum()
    else:
        thread, begun = threading.Thread(target=checksum), 0
        thread.start()
        for part in parts:
            file.write(part)
            if file.tell() - begun > safetensors_writer.SMALL:
                begun = _have_written(file, begun)
        _have_written(file, begun)
        thread.join()
    return {"size": size, "sha256": digest.hexdigest()}


def _have_written(file: IO[bytes], begin: int) -> int:
    """Have the disk begin with the file from ``begin`` on, without waiting for it; returns where the file ends."""
    file.flush()
    if hasattr(os, "posix_fadvise"):  # Linux starts writing what it is told will not be needed in memory
        os.posix_fadvise(file.fileno(), begin, 0, os.POSIX_FADV_DONTNEED)
    return file.tell()


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(value: Any) -> bytes:
    """JSON that is the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk: free some and start again, the run resumes"
    return f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
