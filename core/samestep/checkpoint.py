"""Write and read checkpoints: atomic, checksummed, and without pickle.

A checkpoint is a folder ``<run-dir>/checkpoints/step-00000469/`` with one safetensors file for each group of arrays
(``model``, ``optimizer``) and ``manifest.json``. The manifest holds the step, the small state (running sums, elapsed
seconds), the options that a resume must repeat, and size and SHA-256 of every file. It carries a SHA-256 of itself, so
that any flipped bit is detected. The folder is written under a temporary name, synced and renamed.

Rank 0 alone reads and writes; it broadcasts the arrays, so no shared disk is assumed. Every rank may call the
functions that only compute (`checksum`, `weights_sha256`, `state_dict_diff`). `samestep.sharded` writes
checkpoints from each rank's shard.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from samestep import ConfigError, NonRetryableError, untrusted

Arrays = dict[str, NDArray[Any]]
FORMAT = 1
_MANIFEST = "manifest.json"
_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_pending: Future[None] | None = None  # of the checkpoint that is being written
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(r"[a-z_]+(-[0-9]{5,})?\.safetensors")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)
_MAX_MANIFEST = 2**27  # bytes; a sharded one names each rank's part of each array
_STEP, _NUMBER, _TEXT = untrusted.integer(0, 2**62), untrusted.number(), untrusted.text(1000)
_FILE = {"size": untrusted.integer(0, 2**62), "sha256": untrusted.text(64)}
_MAPPING = untrusted.mapping(lambda value: True, 10**6)
_BODY = {"app": _TEXT, "step": _STEP, "state": _MAPPING, "arithmetic": _MAPPING, "files": _MAPPING, "pieces": _MAPPING}
# The values of the state that a run relies on.
_STATE: dict[str, untrusted.Check] = {
    **dict.fromkeys(("requested_dataset", "dataset_fingerprint", "threads"), untrusted.optional(_TEXT)),
    "metadata": _MAPPING,
    **dict.fromkeys(("epoch_loss_sum", "epoch_correct"), _NUMBER),
    "train_loss": untrusted.optional(_NUMBER),
    "seconds": untrusted.number(0, 1e15),
    "best": lambda value: untrusted.mapping(_NUMBER)(value) and _STEP(value.get("step")),
}


class CorruptCheckpoint(Exception):
    """Say why a checkpoint cannot be used."""


class UnsupportedFormat(CorruptCheckpoint):
    """Report a checkpoint, which may be good, that another version of this package wrote."""


@dataclass(frozen=True)
class Checkpoint:
    """A good checkpoint.

    ``state`` and ``resume_invariants`` are JSON values. ``contents`` has the verified bytes of each group's safetensors
    file, or nothing if only the manifest was read. ``files`` and, for a sharded one, ``pieces`` are the manifest's.
    """

    folder: Path
    app: str
    step: int
    state: dict[str, Any]
    resume_invariants: dict[str, Any]
    contents: dict[str, bytes]
    files: dict[str, dict[str, Any]]
    pieces: dict[str, Any]

    def arrays(self, group: str) -> Arrays:
        """Return one group's arrays by name. Raises NonRetryableError if the file is not a safetensors file."""
        try:
            return safetensors.numpy.load(self.contents[group])
        except (KeyError, SafetensorError, ValueError, TypeError) as error:
            raise NonRetryableError(f"checkpoint {self.folder}: {group}.safetensors cannot be read: {error}") from error


GroupNames = Iterable[str]  # such as "model" and "optimizer"
Reader = Optional[Callable[..., Checkpoint]]  # takes the place of `read`

# --- writing -----------------------------------------------------------------------------------------------------


def save(
    run_dir: Path,
    app: str,
    step: int,
    groups: Mapping[str, Arrays],
    state: Mapping[str, Any],
    resume_invariants: Mapping[str, Any],
    keep: int,
    protected_step: int | None = None,
) -> Path:
    """Write the checkpoint of ``step`` and delete older ones.

    Returns as soon as the arrays are copied, so they may change. A thread writes the files; `finish`, which the next
    call begins with, waits for it.

    Args:
        run_dir: the run's folder.
        app: the app's name.
        step: the number of updates done.
        groups: arrays by group and name.
        state: JSON values to restore.
        resume_invariants: options that a resume must repeat.
        keep: how many of the newest checkpoints to keep.
        protected_step: a step whose checkpoint is kept as well.

    Raises:
        NonRetryableError: the previous checkpoint could not be written; earlier ones are untouched.
    """
    finish()
    folder = folder_of(run_dir, step)
    contents = {f"{group}.safetensors": serialize(arrays) for group, arrays in groups.items()}
    body = {"format": FORMAT, "app": app, "step": step, "state": dict(state), "arithmetic": dict(resume_invariants)}

    def write() -> None:
        with writing(f"checkpoint {folder}", temporary_of(folder)):
            clear(run_dir)
            temporary_of(folder).mkdir(parents=True)
            files = {name: write_file(temporary_of(folder) / name, content) for name, content in contents.items()}
            commit(folder, {**body, "files": files}, keep, protected_step)

    submit(write)
    return folder


def serialize(arrays: Arrays) -> bytes:
    """Return the content of a safetensors file. Raises TypeError for a dtype that it cannot hold."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > 8:
            raise TypeError(f"{name} is {array.dtype}, which no safetensors file can hold")
    # Its writer takes an array's memory as it lies.
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def submit(write: Callable[[], None]) -> None:
    """Let the writer thread call ``write``; `finish` waits for it and raises its exception."""
    global _pending
    _pending = _writer.submit(write)


def finish() -> None:
    """Wait until the last checkpoint is on the disk under its name. Raises NonRetryableError if that fails."""
    global _pending
    pending, _pending = _pending, None
    if pending:
        pending.result()


def commit(folder: Path, body: Mapping[str, Any], keep: int, protected_step: int | None) -> None:
    """Write the manifest beside the files, rename the temporary folder to ``folder``, and delete old checkpoints.

    A kill at any moment leaves complete checkpoints, with or without the newest. Raises OSError.
    """
    temporary, content = temporary_of(folder), _canonical(body)
    write_file(temporary / _MANIFEST, b'{"manifest": %b,\n "sha256": "%b"}' % (content, _sha256(content).encode()))
    sync_folder(temporary)
    replaced = _move_folder(temporary, folder)
    sync_folder(folder.parent)
    if replaced:
        delete(replaced)
    for old in folders(folder.parents[1])[keep:]:
        if int(old.name[5:]) != protected_step:
            with contextlib.suppress(OSError):
                shutil.rmtree(old.rename(temporary_of(old)))


def _move_folder(source: Path, target: Path) -> Path | None:
    """Rename ``source`` to ``target``; return the new name of a folder that was at ``target``, or None.

    The two folders exchange their names if the system can do that, so that a kill never leaves ``target`` missing.
    """
    if not target.is_dir():
        source.rename(target)  # raises OSError if a file is in the way
        return None
    library = ctypes.CDLL(None)
    if hasattr(library, "renameat2"):
        paths = _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target)
        if library.renameat2(*paths, _RENAME_EXCHANGE) == 0:
            return source
    replaced = target.with_name(f".{target.name}.replaced.tmp")
    target.rename(replaced)
    source.rename(target)
    return replaced


@contextlib.contextmanager
def writing(what: object, temporary: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the context into a NonRetryableError, and delete the half-written ``temporary``."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            delete(temporary) if temporary else None
        raise NonRetryableError(f"cannot write {what}: {os_error_message(error)}") from error


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a file, sync it, and return its entry in a manifest: size and SHA-256. Raises OSError."""
    with untrusted.create(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(content), "sha256": _sha256(content)}


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync it and rename it. Raises OSError; nothing partial is left."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_file(temporary, content)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Make a folder's entries survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(run_dir: Path) -> None:
    """Delete folders that a killed process left half-written or half-deleted. Raises OSError."""
    for entry in _entries(run_dir):
        if entry.startswith(".step-") and entry.endswith(".tmp"):
            delete(run_dir / "checkpoints" / entry)


def delete(path: Path) -> None:
    """Delete a folder or file; do not follow a link. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- reading -----------------------------------------------------------------------------------------------------


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def temporary_of(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.tmp")


def folders(run_dir: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first; half-written ones have other names. Raises ConfigError."""
    names = [run_dir / "checkpoints" / entry for entry in _entries(run_dir) if _STEP_FOLDER.fullmatch(entry)]
    return sorted(names, key=lambda folder: int(folder.name[5:]), reverse=True)


def newest(
    run_dir: Path,
    warn: Callable[[str], None],
    verify: bool = True,
    reader: Reader = None,
    groups: GroupNames = (),
    remedy: str = "",
) -> Checkpoint | None:
    """Return the newest good checkpoint, or None if the run dir has none at all.

    Args:
        run_dir: the run's folder.
        warn: called with one line for each corrupt checkpoint that is newer.
        verify: False checks manifests alone.
        reader: takes the place of `read`, such as one that shares the work among ranks.
        groups: names of groups. A checkpoint without one of them counts as corrupt, because a resume would start that
            group from its initial values.
        remedy: the advice of an error, other than to restore a checkpoint.

    Raises:
        NonRetryableError: there are checkpoints but none is good. A silent fresh start would throw the run away.
        ConfigError: another version of this package wrote one.
    """
    corrupt = []
    if not remedy:
        remedy = "start a new run with --no-resume or another --run-dir"
    for folder in folders(run_dir):
        try:
            candidate = (reader or read)(folder, verify)
            if missing := sorted({*groups} - {*candidate.contents}):
                raise CorruptCheckpoint(f"{_MANIFEST} lacks the group {missing[0]}")
        except UnsupportedFormat as error:  # an older one would repeat its steps, and rename it
            text = f"checkpoint {folder} is of another version of samestep: {error}: use that version, or {remedy}"
            raise ConfigError(text) from error
        except CorruptCheckpoint as error:
            corrupt.append(f"{folder.name} ({error})")
            continue
        for text in corrupt:
            warn(f"checkpoint {text} is damaged and skipped; using {candidate.folder.name}")
        return candidate
    if corrupt := [*corrupt, *(entry for entry in _entries(run_dir) if entry.startswith("unequal-"))]:
        place, listed = run_dir / "checkpoints", "; ".join(corrupt)
        raise NonRetryableError(f"no checkpoint in {place} is good: {listed}: restore one, or {remedy}")
    return None


def read(folder: Path, verify: bool = True) -> Checkpoint:
    """Read and verify one checkpoint; without ``verify`` only its manifest and the files' sizes.

    Raises CorruptCheckpoint.
    """

    def require(good: object, problem: str, kind: type[CorruptCheckpoint] = CorruptCheckpoint) -> None:
        if not good:
            raise kind(problem)

    try:
        require((folder / _MANIFEST).stat().st_size <= _MAX_MANIFEST, f"{_MANIFEST} is too large")
        manifest = untrusted.parse_object(untrusted.read_bytes(folder / _MANIFEST))
        untrusted.check(manifest, {"manifest": _MAPPING})
        body = {"pieces": {}, **manifest["manifest"]}
        digest = _sha256(_canonical(manifest["manifest"]))
        require(manifest.get("sha256") == digest, f"{_MANIFEST} does not match its own checksum")
        version = f"{_MANIFEST} has format {body.get('format')!r:.60}, this program reads {FORMAT}"
        require(body.get("format") == FORMAT, version, UnsupportedFormat)
        untrusted.check(body, _BODY)
        state, files, contents = body["state"], body["files"], {}
        untrusted.check(state, {name: is_valid for name, is_valid in _STATE.items() if name in state})
        require(folder.name == f"step-{body['step']:08d}", f"{_MANIFEST} is of step {body['step']}")
        for name, entry in files.items():
            # A manifest must not lead out of its folder.
            require(_FILE_NAME.fullmatch(name) and _MAPPING(entry), f"{_MANIFEST} names the file {name[:60]!r}")
            untrusted.check(entry, _FILE)
            size = (folder / name).stat().st_size
            require(size == entry["size"], f"{name} has {size} bytes, not {entry['size']}")
            if verify:
                content = untrusted.read_bytes(folder / name)
                require(_sha256(content) == entry["sha256"], f"{name} does not match its checksum")
                contents[name.removesuffix(".safetensors")] = content
        return Checkpoint(folder, body["app"], body["step"], state, body["arithmetic"], contents, files, body["pieces"])
    except OSError as error:
        raise CorruptCheckpoint(os_error_message(error)) from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{_MANIFEST} is corrupted ({error})") from error


def quarantine(folder: Path, why: str) -> None:
    """Rename a checkpoint to "damaged-..." or "unequal-...", so that it is kept but no longer counted."""
    kept = folder.with_name(f"{why}-{folder.name}")
    delete(kept)
    folder.rename(kept)


# --- weights -----------------------------------------------------------------------------------------------------


def weights_sha256(weights: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and little-endian bytes of all arrays, in sorted name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.asarray(weights[name], order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(digest_line(name, array))
        digest.update(array.tobytes())
    return digest.hexdigest()


def digest_line(name: str, array: Any) -> bytes:
    """Return the prefix that `weights_sha256` hashes before an array's bytes."""
    return f"{name} {array.dtype.name} {list(array.shape)}\n".encode()


def save_weights(path: Path, weights: Arrays) -> None:
    """Write a safetensors file atomically, after the last checkpoint. Raises NonRetryableError."""
    finish()
    with writing(path):
        write_atomic(path, serialize(weights))


def load_weights(path: Path) -> Arrays:
    """Read a safetensors file of weights. Raises ConfigError if it is missing or not one."""
    try:
        return safetensors.numpy.load(untrusted.read_bytes(path))
    except OSError as error:
        raise ConfigError(f"--init-from {path}: {os_error_message(error)}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--init-from {path} is not a readable safetensors file: {error}") from error


def state_dict_diff(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the first difference of arrays in names, shapes or dtypes; None if ``given`` fits ``wanted``."""
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


def _entries(run_dir: Path) -> list[str]:
    try:
        return os.listdir(run_dir / "checkpoints")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot use --run-dir {run_dir}: {os_error_message(error)}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(value: Any) -> bytes:
    """Return JSON that is the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def os_error_message(error: OSError) -> str:
    """Describe an OSError with its path; for a full disk also the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk: free some and start again, the run resumes"
    problem = error.strerror or str(error)
    return f"{problem}: {error.filename}" if error.filename else problem
