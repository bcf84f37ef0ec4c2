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

import atexit
import contextlib
import errno
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Optional, Union

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from samestep import ConfigError, NonRetryableError, manifest, untrusted
from samestep.root import LinkError, Root
from samestep.snapshot import Snapshot
from samestep.untrusted import shown

Arrays = dict[str, NDArray[Any]]
_SURROGATE = re.compile("[\ud800-\udfff]")  # no UTF-8 has one
FORMAT = manifest.FORMAT
_MANIFEST = "manifest.json"
REPORTED_WAIT = 0.5  # seconds from which `wait_for_previous` reports a wait
_pending: dict[int, Future[None]] = {}  # the checkpoint that is being written, by the rank that writes
_threads: dict[int, _WriterThread] = {}  # by rank
_is_wait_reported = False
process_fails = threading.Event()  # `samestep.log.run` sets it: other ranks may have ended, so no thread waits for them


class CorruptCheckpoint(Exception):
    """Report why a checkpoint cannot be used."""


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
            file = f"checkpoint {self.folder}: {shown(group)}.safetensors"
            raise NonRetryableError(f"{file} cannot be read: {shown(error, limit=200)}") from error


GroupNames = Iterable[str]  # such as "model" and "optimizer"
Reader = Optional[Callable[..., Checkpoint]]  # takes the place of `read`
Report = Optional[Callable[[str], None]]  # takes one line for the log
Content = Union[bytes, memoryview]

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
    report: Report = None,
    before_commit: Callable[[], object] = lambda: None,
) -> Path:
    """Write the checkpoint of ``step`` and delete older ones.

    Returns as soon as all values are checked and copied, so they may change. A thread hashes and writes the files;
    `finish`, which the next call begins with, waits for it. So at most one checkpoint is lost by a kill, and the copies
    take the memory of one checkpoint, which stays for later saves.

    Args:
        run_dir: the run's folder.
        app: the app's name.
        step: the number of updates done.
        groups: arrays by group and name.
        state: JSON values to restore, as `manifest.seal` describes them.
        resume_invariants: options that a resume must repeat, as JSON values.
        keep: how many of the newest checkpoints to keep, at least 1.
        protected_step: a step whose checkpoint is kept as well.
        report: see `wait_for_previous`.
        before_commit: called by the thread before the checkpoint gets its name, to sync what the checkpoint relies on.

    Raises:
        NonRetryableError: a value cannot be kept in a checkpoint, or the previous checkpoint could not be written;
            earlier ones are untouched.
    """
    wait_for_previous(f"step {step}", report)
    if keep < 1:
        raise NonRetryableError(f"cannot save a checkpoint with keep={keep}: keep at least 1")
    for arrays in groups.values():
        check_arrays(arrays)
    snapshot = Snapshot({f"{group}.safetensors": arrays for group, arrays in groups.items()})
    files = {}
    for group, arrays in groups.items():
        name = f"{group}.safetensors"
        tensors = dict.fromkeys(arrays, "0" * 16)
        files[name] = {"size": snapshot.sizes[name], "sha256": "0" * 64, "tensors": tensors}
    values = {"app": app, "step": step, "state": dict(state), "arithmetic": dict(resume_invariants)}
    body = manifest.seal({**values, "files": files})
    folder = folder_of(run_dir, step)
    snapshot.copy()

    def write() -> None:
        with contextlib.closing(snapshot), writing(f"checkpoint {folder}", folder):
            clear(run_dir)
            Root(run_dir).make_folder(temporary_name(folder), exist_ok=False)
            for name, content in snapshot.contents.items():
                body["files"][name] = {**write_file(folder, name, content), "tensors": tensor_digests(content)}
            before_commit()
            commit(folder, body, keep, protected_step)

    submit(write)
    return folder


def serialize(arrays: Arrays) -> bytes:
    """Return the content of a safetensors file. Raises NonRetryableError for an array that it cannot hold."""
    check_arrays(arrays)
    # Its writer takes an array's memory as it lies.
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def check_arrays(arrays: Arrays) -> None:
    """Raise NonRetryableError as `check_array` for each array."""
    for name, array in arrays.items():
        check_array(name, array)


def check_array(name: Any, array: Any) -> None:
    """Raise NonRetryableError unless a safetensors file gives back the same array under the same name."""
    if not isinstance(name, str) or name == "__metadata__" or _SURROGATE.search(name):
        raise NonRetryableError(
            f"an array has the name {shown(repr(name))}, which no safetensors file can hold: rename it"
        )
    if not isinstance(array, (np.ndarray, np.generic)):
        raise NonRetryableError(f"{shown(name)} is {type(array).__name__}, not an array: convert it with numpy.asarray")
    dtype = array.dtype
    if dtype.kind not in "biufc" or dtype.itemsize > 8 or not dtype.isnative:
        raise NonRetryableError(f"{shown(name)} is {shown(dtype)}, which no safetensors file can hold: convert it")


def submit(write: Callable[[], None], writer: int = 0) -> None:
    """Let a thread call ``write``; `finish` waits for it and raises its exception. ``writer`` is the rank."""
    if writer not in _threads:
        _threads[writer] = _WriterThread()
    _pending[writer] = _threads[writer].submit(write)


class _WriterThread:
    """A thread that writes checkpoints. To start one takes longer than to wake it.

    It is a daemon, so that a program whose other ranks are gone can end; see `_finish_at_exit`.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Let the thread call ``write``; the result has its exception."""
        future: Future[None] = Future()
        self._jobs.put((write, future))
        return future

    def _run(self) -> None:
        while True:
            write, future = self._jobs.get()
            try:
                write()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del write  # and with it, the arrays that it holds


def finish(writer: int | None = None) -> None:
    """Wait until the last checkpoint is on the disk under its name.

    ``writer`` names a rank, if several are threads of this process; None waits for all.

    Raises:
        NonRetryableError: the checkpoint could not be written.
    """
    writers = list(_pending) if writer is None else [writer]
    for each in writers:
        pending = _pending.pop(each, None)
        if pending:
            pending.result()


@atexit.register
def _finish_at_exit() -> None:
    """Finish at the end of a program that does not. Other ranks may have ended, so no thread waits long for them."""
    process_fails.set()
    with contextlib.suppress(Exception):
        finish()


def _forget_threads() -> None:
    _pending.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)  # a child has no thread that writes


def wait_for_previous(what: str, report: Report = None, writer: int = 0) -> None:
    """Wait as `finish` before a save, because one checkpoint at a time is written.

    Args:
        what: names the checkpoint that waits, such as "step 20".
        report: called with one line if training waited; once in a process.
        writer: the rank that writes.

    Raises:
        NonRetryableError: the checkpoint before could not be written.
    """
    global _is_wait_reported
    begun = time.monotonic()
    finish(writer)
    seconds = time.monotonic() - begun
    if report and seconds >= REPORTED_WAIT and not _is_wait_reported:
        _is_wait_reported = True
        report(
            f"training waited {seconds:.1f} s before the save of {shown(what)}, until the checkpoint before was on "
            "the disk: save less often, or to a faster disk"
        )


def commit(folder: Path, body: Mapping[str, Any], keep: int, protected_step: int | None) -> None:
    """Write the manifest beside the files, rename the temporary folder to ``folder``, and delete old checkpoints.

    A kill at any moment leaves complete checkpoints, with or without the newest. Raises OSError.

    Args:
        folder: final name of the checkpoint.
        body: content of the manifest.
        keep: number of checkpoints to keep.
        protected_step: step of a checkpoint that is never deleted, or None.
    """
    root = Root(folder.parents[1])
    content = manifest.encode(body)
    write_file(folder, _MANIFEST, b'{"manifest": %b,\n "sha256": "%b"}' % (content, _sha256(content).encode()))
    temporary = temporary_name(folder)
    name = f"checkpoints/{folder.name}"
    root.sync(temporary)
    is_exchanged = root.exchange_folders(temporary, name)  # if there is one of the same step
    if not is_exchanged:
        root.delete_folder(name)
        root.rename(temporary, name)
    root.sync("checkpoints")
    if is_exchanged:
        root.delete(temporary)
    for old in folders(root.path)[keep:]:
        if _step_of(old) != protected_step:
            with contextlib.suppress(OSError):
                root.rename(f"checkpoints/{old.name}", temporary_name(old))
                root.delete(temporary_name(old))


@contextlib.contextmanager
def writing(what: object, folder: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the context into a NonRetryableError.

    If it writes the checkpoint ``folder``, delete its half-written files.
    """
    try:
        yield
    except OSError as error:
        if folder:
            with contextlib.suppress(OSError):
                Root(folder.parents[1]).delete(temporary_name(folder))
        raise NonRetryableError(f"cannot write {what}: {os_error_message(error)}") from error


def write_file(folder: Path, name: str, content: Content) -> dict[str, Any]:
    """Write and sync a file of the checkpoint ``folder``, under the folder's temporary name.

    Returns its entry in a manifest: size and SHA-256. Raises OSError.

    Args:
        folder: final name of the checkpoint.
        name: name of the file.
        content: its bytes.
    """
    with Root(folder.parents[1]).create(f"{temporary_name(folder)}/{name}") as file:
        _write_synced(file, content)
    return {"size": len(content), "sha256": _sha256(content)}


def tensor_digests(content: Content) -> dict[str, str]:
    """Return a 64-bit digest of each tensor in a safetensors file: 16 hexadecimal digits of the bytes' SHA-256.

    The digests name the tensor in which two checkpoints differ, or that is damaged.

    Args:
        content: the file.
    """
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:begin]))
    header.pop("__metadata__", None)
    digests = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        digests[name] = hashlib.sha256(memoryview(content)[begin + first : begin + end]).hexdigest()[:16]
    return digests


def write_atomic(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name, sync it and rename it. Raises OSError; nothing partial is left.

    ``content`` may be a function that writes it.
    """
    root = Root(path.parent)
    temporary = f".{path.name}.tmp"
    try:
        with root.create(temporary) as file:
            _write_synced(file, content)
        root.rename(temporary, path.name)
    finally:
        with contextlib.suppress(OSError):
            root.unlink(temporary)


def _write_synced(file: IO[bytes], content: Content | Callable[[IO[bytes]], object]) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content)
    file.flush()
    os.fsync(file.fileno())


def clear(run_dir: Path) -> None:
    """Delete folders that a killed process left half-written or half-deleted. Raises OSError."""
    for entry in _entries(run_dir):
        if entry.startswith(".step-") and entry.endswith(".tmp"):
            Root(run_dir).delete(f"checkpoints/{entry}")


# --- reading -----------------------------------------------------------------------------------------------------


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def temporary_of(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.tmp")


def temporary_name(folder: Path) -> str:
    """Return `temporary_of`, relative to the run dir."""
    return f"checkpoints/{temporary_of(folder).name}"


def folders(run_dir: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first; half-written ones have other names. Raises ConfigError."""
    names = [run_dir / "checkpoints" / entry for entry in _entries(run_dir) if manifest.STEP_FOLDER.fullmatch(entry)]
    return sorted(names, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


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
            _check_groups(candidate, groups)
        except UnsupportedFormat as error:  # an older one would repeat its steps, and rename it
            raise ConfigError(
                f"checkpoint {folder} is of another version of samestep: {error}: use that version, or {remedy}"
            ) from error
        except CorruptCheckpoint as error:
            corrupt.append(f"{folder.name} ({error})")
            continue
        for text in corrupt:
            warn(f"checkpoint {text} is damaged and skipped; using {candidate.folder.name}")
        return candidate
    corrupt += [entry for entry in _entries(run_dir) if entry.startswith("unequal-")]
    if corrupt:
        place = run_dir / "checkpoints"
        listed = shown("; ".join(corrupt), limit=1000)
        raise NonRetryableError(f"no checkpoint in {place} is good: {listed}: restore one, or {remedy}")
    return None


def _check_groups(candidate: Checkpoint, groups: GroupNames) -> None:
    missing = sorted(set(groups) - set(candidate.contents))
    if missing:
        raise CorruptCheckpoint(f"{_MANIFEST} lacks the group {missing[0]}")


def read(folder: Path, verify: bool = True) -> Checkpoint:
    """Read and verify one checkpoint; without ``verify`` only its manifest and the files' sizes.

    Raises CorruptCheckpoint.
    """
    try:
        body = _read_manifest(folder)
        contents = {}
        for name, entry in body["files"].items():
            _check_size(folder / name, entry["size"])
            if verify:
                group = name.removesuffix(".safetensors")
                contents[group] = _read_verified(folder / name, entry["sha256"])
    except OSError as error:
        raise CorruptCheckpoint(os_error_message(error)) from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{_MANIFEST} is corrupted ({error})") from error
    return Checkpoint(
        folder=folder,
        app=body["app"],
        step=body["step"],
        state=body["state"],
        resume_invariants=body["arithmetic"],
        contents=contents,
        files=body["files"],
        pieces=body["pieces"],
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the verified content of a manifest. Raises CorruptCheckpoint, OSError or ValueError."""
    path = folder / _MANIFEST
    if path.stat().st_size > manifest.MAX_BYTES:
        raise CorruptCheckpoint(f"{_MANIFEST} is too large")
    content = untrusted.parse_object(untrusted.read_bytes(path))
    untrusted.check(content, {"manifest": manifest.MAPPING})
    digest = _sha256(manifest.encode(content["manifest"]))
    if content.get("sha256") != digest:
        raise CorruptCheckpoint(f"{_MANIFEST} does not match its own checksum")
    body = {"pieces": {}, **content["manifest"]}
    if body.get("format") != manifest.FORMAT:
        form = shown(repr(body.get("format")), limit=60)
        raise UnsupportedFormat(f"{_MANIFEST} has format {form}, this program reads {manifest.FORMAT}")
    manifest.verify(body)
    if folder.name != f"step-{body['step']:08d}":
        raise CorruptCheckpoint(f"{_MANIFEST} is of step {body['step']}")
    return body


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise CorruptCheckpoint(f"{path.name} has {size} bytes, not {expected}")


def _read_verified(path: Path, sha256: str) -> bytes:
    content = untrusted.read_bytes(path)
    if _sha256(content) != sha256:
        raise CorruptCheckpoint(f"{path.name} does not match its checksum")
    return content


def quarantine(folder: Path, why: str) -> None:
    """Rename a checkpoint to "damaged-..." or "unequal-...", so that it is kept but no longer counted."""
    root = Root(folder.parents[1])
    kept = f"checkpoints/{why}-{folder.name}"
    root.delete(kept)
    root.rename(f"checkpoints/{folder.name}", kept)


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


def weights_file(group: str) -> str:
    """Return the name of a group's file of final weights."""
    return "model.safetensors" if group == "model" else f"model-{group}.safetensors"


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
        reason = shown(error, limit=200)
        raise ConfigError(f"--init-from {path} is not a readable safetensors file: {reason}") from error


def state_dict_diff(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the first difference of arrays in names, shapes or dtypes; None if ``given`` fits ``wanted``."""
    for name in sorted({*given, *wanted}):
        what = shown(name)
        if name not in given:
            return f"{what} is missing"
        if name not in wanted:
            return f"{what} is not part of it"
        if given[name].shape != wanted[name].shape:
            return f"{what} has shape {list(given[name].shape)}, not {list(wanted[name].shape)}"
        if given[name].dtype != wanted[name].dtype:
            return f"{what} is {given[name].dtype}, not {wanted[name].dtype}"
    return None


def _entries(run_dir: Path) -> list[str]:
    try:
        return Root(run_dir).names("checkpoints")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot use --run-dir {run_dir}: {os_error_message(error)}") from error


def _sha256(content: Content) -> str:
    return hashlib.sha256(content).hexdigest()


def os_error_message(error: OSError) -> str:
    """Describe an OSError with its path; for a full disk also the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk: free some and start again, the run resumes"
    if isinstance(error, LinkError):
        return f"{error.filename} is a link: remove it, or name its target by --run-dir"
    problem = error.strerror or str(error)
    if error.filename:
        return f"{problem}: {error.filename}"
    return problem
