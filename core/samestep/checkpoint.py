"""Write and read atomic, checksummed checkpoints without pickle.

A checkpoint is a folder ``<run-dir>/checkpoints/step-00000469/`` with one safetensors file for each group of arrays
(``model``, ``optimizer``) and ``manifest.json``. The manifest contains the step, the state in JSON (running sums,
elapsed seconds) and the options that a resume must repeat. To detect flipped bits, the manifest also has the size and
SHA-256 of every file, and a SHA-256 of its own content. The folder is written under a temporary name, synced and
renamed.

If every rank has a replica of the model, only rank 0 calls the functions that read and write checkpoints. At a resume,
rank 0 broadcasts the arrays, so the ranks need no shared disk. Every rank may call the functions that only compute,
such as `weights_sha256`. For a sharded model, `samestep.sharded` replaces `save` and `read`, and each rank writes its
shards.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import multiprocessing.util
import os
import re
import sys
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
from samestep.checksums import Checksums
from samestep.root import LinkError, Root
from samestep.snapshot import Snapshot
from samestep.untrusted import shown

Arrays = dict[str, NDArray[Any]]
_SURROGATE = re.compile("[\ud800-\udfff]")  # characters that UTF-8 cannot encode
FORMAT = manifest.FORMAT
_MANIFEST = "manifest.json"
TRANSIENT = {errno.EAGAIN, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
RETRY_SECONDS = (0.5, 2.0)  # waits before another attempt to read a checkpoint
REPORTED_WAIT = 0.5  # minimum seconds of a wait that `wait_for_previous` reports
_pending: dict[int, Future[None]] = {}  # the checkpoint that a thread is writing, by rank
_threads: dict[int, _WriterThread] = {}  # the threads that write, by rank
_is_wait_reported = False
process_fails = threading.Event()  # set after a failure and at exit, so that threads stop waiting for ended ranks


class CorruptCheckpoint(Exception):
    """A checkpoint cannot be used. The message has the reason."""


class UnsupportedFormat(CorruptCheckpoint):
    """Another version of this package wrote the checkpoint, and may be able to read it."""


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        app: name of the app that wrote it.
        step: number of updates done.
        state: JSON values to restore.
        resume_invariants: options that a resume must repeat, as JSON values.
        contents: verified bytes of each group's safetensors file; {} if `read` did not read the files.
        files: the manifest's entry of each file (size, SHA-256, digests of its tensors), by file name.
        pieces: the manifest's locations of arrays, by group; {} unless the checkpoint is sharded.
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
        """Return one group's arrays by name.

        Raises:
            NonRetryableError: the group is missing, or its file is not a valid safetensors file.
        """
        try:
            return safetensors.numpy.load(self.contents[group])
        except (KeyError, SafetensorError, ValueError, TypeError) as error:
            file = f"checkpoint {self.folder}: {shown(group)}.safetensors"
            raise NonRetryableError(f"{file} cannot be read: {shown(error, limit=200)}") from error


GroupNames = Iterable[str]  # such as "model" and "optimizer"
Reader = Optional[Callable[..., Checkpoint]]  # a function that replaces `read`
Report = Optional[Callable[[str], None]]  # a function that logs one line
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
    compare: Callable[[Checksums], object] | None = None,
    before_commit: Callable[[], object] = lambda: None,
) -> Path:
    """Save the checkpoint of ``step`` in a thread, and delete old checkpoints.

    This function checks and copies all values before it returns, so the caller may then change them. A thread hashes
    and writes the files. The next call first waits for this thread. Therefore a kill loses at most one checkpoint. The
    copies need the memory of one checkpoint, and later saves reuse this memory.

    Args:
        run_dir: folder of the run.
        app: name of the app, such as "cifar_ddp".
        step: number of updates done.
        groups: arrays by group and name.
        state: JSON values to restore, as `manifest.seal` describes them.
        resume_invariants: options that a resume must repeat, as JSON values.
        keep: number of newest checkpoints to keep, at least 1.
        protected_step: step of another checkpoint to keep, or None.
        report: function that logs one line if this call waits for the previous checkpoint; see `wait_for_previous`.
        compare: function that is called with the checksums of the copies, by group and name. If it raises an exception,
            nothing is saved.
        before_commit: function that the thread calls before it renames the folder, to sync other files of the run.

    Returns:
        The checkpoint's folder.

    Raises:
        NonRetryableError: a value is invalid, or the previous checkpoint could not be written. Earlier checkpoints
            remain unchanged.
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
    snapshot.copy(with_checksums=compare is not None)
    if compare:
        try:
            compare({group: snapshot.checksums[f"{group}.safetensors"] for group in groups})
        except BaseException:
            snapshot.close()
            raise

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
    """Return arrays as the content of a safetensors file.

    Raises:
        NonRetryableError: a value is not an array, or the format does not support its name or dtype.
    """
    check_arrays(arrays)
    # safetensors ignores an array's strides and writes its memory, so the array must be in C order.
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def check_arrays(arrays: Arrays) -> None:
    """Raise NonRetryableError unless a safetensors file can store every array exactly."""
    for name, array in arrays.items():
        check_array(name, array)


def check_array(name: Any, array: Any) -> None:
    """Raise NonRetryableError unless a safetensors file can store the array's name, dtype and bits exactly."""
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
    """Call ``write`` in the thread of the rank ``writer``. `finish` waits for the call and raises its exception."""
    if writer not in _threads:
        _threads[writer] = _WriterThread()
    _pending[writer] = _threads[writer].submit(write)


class _WriterThread:
    """A thread that writes all checkpoints of a rank, because waking a thread is faster than starting one.

    The thread is a daemon, so that a program can exit after other ranks have ended; see `_finish_at_exit`.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        # A process of multiprocessing calls no exit functions of atexit.
        multiprocessing.util.Finalize(None, _finish_at_exit, exitpriority=100)
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Call ``write`` in the thread, and return a future that gets its exception."""
        future: Future[None] = Future()
        self._jobs.put((write, future))
        return future

    def _run(self) -> None:
        while True:
            write, future = self._jobs.get()
            problem: BaseException | None = None
            try:
                write()
            except BaseException as error:
                problem = error
            # Free the arrays that the function refers to, while the program still waits for the future. At Python's
            # end, this thread could not free a framework's memory.
            del write
            if problem is None:
                future.set_result(None)
            else:
                future.set_exception(problem)
            del problem


def finish(writer: int | None = None) -> None:
    """Wait until the last checkpoint is complete on the disk.

    Args:
        writer: the rank whose checkpoint to wait for, if several ranks are threads of this process; None for all.

    Raises:
        NonRetryableError: the checkpoint could not be written.
    """
    writers = list(_pending) if writer is None else [writer]
    for each in writers:
        pending = _pending.get(each)
        if pending:
            try:
                pending.result()
            finally:
                if pending.done():  # after Ctrl-C, the exit function must still wait for a write that runs
                    _pending.pop(each, None)


@atexit.register
def _finish_at_exit() -> None:
    """Finish the last checkpoint at exit, without a long wait for ranks that have ended. Exit with 1 if it fails."""
    process_fails.set()
    try:
        finish()
    except Exception as error:
        print(f"error: {shown(error, limit=untrusted.MAX_LINE)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception of an exit function does not change the exit code


def _forget_threads() -> None:
    _pending.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)  # the threads do not exist in a forked child


def wait_for_previous(what: str, report: Report = None, writer: int = 0) -> None:
    """Wait until the previous checkpoint is written, because a rank writes one checkpoint at a time.

    Args:
        what: name of the next checkpoint, such as "step 20", for the report.
        report: function that logs one line after a wait of REPORTED_WAIT seconds or more, at most once per process.
        writer: rank that writes the checkpoint.

    Raises:
        NonRetryableError: the previous checkpoint could not be written.
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

    If the process is killed during this call, every checkpoint in the run dir is complete, but the new one may be
    missing.

    Args:
        folder: final path of the checkpoint.
        body: content of the manifest, without its SHA-256.
        keep: number of newest checkpoints to keep.
        protected_step: step of a checkpoint that is never deleted, or None.

    Raises:
        OSError: a write fails.
    """
    root = Root(folder.parents[1])
    content = manifest.encode(body)
    write_file(folder, _MANIFEST, b'{"manifest": %b,\n "sha256": "%b"}' % (content, _sha256(content).encode()))
    temporary = temporary_name(folder)
    name = f"checkpoints/{folder.name}"
    root.sync(temporary)
    is_exchanged = root.exchange_folders(temporary, name)  # False if no checkpoint of this step exists
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
    """Convert an OSError in the context to NonRetryableError.

    Args:
        what: description of the file or checkpoint, for the message.
        folder: final path of a checkpoint, whose temporary folder is deleted after an OSError; None for a file.
    """
    try:
        yield
    except OSError as error:
        if folder:
            with contextlib.suppress(OSError):
                Root(folder.parents[1]).delete(temporary_name(folder))
        raise NonRetryableError(f"cannot write {what}: {os_error_message(error)}") from error


def write_file(folder: Path, name: str, content: Content) -> dict[str, Any]:
    """Write and sync a file in the temporary folder of a checkpoint.

    Args:
        folder: final path of the checkpoint.
        name: name of the file.
        content: the bytes to write.

    Returns:
        The file's entry in the manifest: size and SHA-256.

    Raises:
        OSError: the write fails.
    """
    with Root(folder.parents[1]).create(f"{temporary_name(folder)}/{name}") as file:
        _write_synced(file, content)
    return {"size": len(content), "sha256": _sha256(content)}


def tensor_digests(content: Content) -> dict[str, str]:
    """Return a digest of each tensor in a safetensors file, by name.

    A digest has the first 16 hexadecimal digits of the SHA-256 of the tensor's bytes. The digests show in which tensors
    two checkpoints differ, and which tensors are damaged.

    Args:
        content: content of the file.
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
    """Write a file under a temporary name, sync it and rename it, so that ``path`` never has incomplete content.

    Args:
        path: path of the file.
        content: the bytes to write, or a function that writes to an open file.

    Raises:
        OSError: the write fails.
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
    """Delete the incomplete checkpoints of killed processes.

    Raises:
        ConfigError: the folder ``checkpoints`` cannot be listed.
        OSError: a deletion fails.
    """
    for entry in _entries(run_dir):
        if entry.startswith(".step-") and entry.endswith(".tmp"):
            Root(run_dir).delete(f"checkpoints/{entry}")


def check_writable(run_dir: Path) -> None:
    """Create the folder of the checkpoints, and create and delete a file in it.

    Raises:
        OSError: the folder cannot be written to.
    """
    root = Root(run_dir)
    root.make_folder("checkpoints")
    name = "checkpoints/.is-writable"
    with root.create(name):
        pass
    root.unlink(name)


# --- reading -----------------------------------------------------------------------------------------------------


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def temporary_of(folder: Path) -> Path:
    """Return the temporary folder in which a checkpoint is written."""
    return folder.with_name(f".{folder.name}.tmp")


def temporary_name(folder: Path) -> str:
    """Return the path of `temporary_of` relative to the run dir."""
    return f"checkpoints/{temporary_of(folder).name}"


def folders(run_dir: Path) -> list[Path]:
    """Return the folders of complete checkpoints, newest first.

    Raises:
        ConfigError: the folder ``checkpoints`` cannot be listed.
    """
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
    """Return the newest valid checkpoint; None if the run dir has no checkpoints.

    Args:
        run_dir: folder of the run.
        warn: function that logs one line for each corrupt checkpoint that is newer than the returned one.
        verify: whether to verify the files' checksums. With False, only the manifests and the files' sizes are checked.
        reader: function that replaces `read`, such as a function that distributes the work over ranks.
        groups: required groups. A checkpoint counts as corrupt if a group is missing, because a resume would start this
            group from its initial values.
        remedy: the last advice in the errors' messages; "" for the default.

    Raises:
        NonRetryableError: the run dir has checkpoints, but all of them are corrupt or renamed to ``unequal-...``. A new
            run would silently replace the existing run.
        ConfigError: another version of this package wrote a checkpoint that is newer than every valid one, or the
            folder ``checkpoints`` cannot be listed.
    """
    corrupt = []
    if not remedy:
        remedy = "start a new run with --no-resume or another --run-dir"
    for folder in folders(run_dir):
        try:
            candidate = (reader or read)(folder, verify)
            _check_groups(candidate, groups)
        except UnsupportedFormat as error:  # a resume from an older checkpoint would quarantine this one
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
    """Read and verify a checkpoint. Without ``verify``, check only the manifest and the files' sizes.

    A file that cannot be read is read again after some seconds, because a network file system may recover.

    Raises:
        CorruptCheckpoint: the manifest or another file is missing, unreadable or corrupt, or of another format.
    """
    for seconds in RETRY_SECONDS:
        try:
            return _read_once(folder, verify)
        except CorruptCheckpoint as error:
            if getattr(error.__cause__, "errno", None) not in TRANSIENT:
                raise
        time.sleep(seconds)
    return _read_once(folder, verify)


def _read_once(folder: Path, verify: bool) -> Checkpoint:
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
    """Return the verified content of a manifest.

    Raises:
        CorruptCheckpoint: the manifest is too large, of another format or of another step, or its checksum is wrong.
        OSError: the file cannot be read.
        ValueError: the content is invalid.
    """
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
    """Rename a checkpoint to ``<why>-step-...``, such as "damaged-step-00000469", so that resumes ignore it."""
    root = Root(folder.parents[1])
    kept = f"checkpoints/{why}-{folder.name}"
    root.delete(kept)
    root.rename(f"checkpoints/{folder.name}", kept)


# --- weights -----------------------------------------------------------------------------------------------------


def weights_sha256(weights: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and little-endian bytes of all arrays, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.asarray(weights[name], order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(digest_line(name, array))
        digest.update(array.tobytes())
    return digest.hexdigest()


def digest_line(name: str, array: Any) -> bytes:
    """Return the line that `weights_sha256` hashes before an array's bytes: name, dtype and shape."""
    return f"{name} {array.dtype.name} {list(array.shape)}\n".encode()


def weights_file(group: str) -> str:
    """Return the file name of a group's final weights."""
    return "model.safetensors" if group == "model" else f"model-{group}.safetensors"


def save_weights(path: Path, weights: Arrays) -> None:
    """Wait for the last checkpoint, then write a safetensors file atomically.

    Raises:
        NonRetryableError: a write fails, or the format does not support an array.
    """
    finish()
    with writing(path):
        write_atomic(path, serialize(weights))


def load_weights(path: Path) -> Arrays:
    """Read the safetensors file of --init-from.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    try:
        return safetensors.numpy.load(untrusted.read_bytes(path))
    except OSError as error:
        raise ConfigError(f"--init-from {path}: {os_error_message(error)}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        reason = shown(error, limit=200)
        raise ConfigError(f"--init-from {path} is not a readable safetensors file: {reason}") from error


def state_dict_diff(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Describe the first difference between two groups of arrays in names, shapes or dtypes.

    Args:
        given: arrays by name.
        wanted: arrays by name to compare with.

    Returns:
        The difference; None if names, shapes and dtypes are equal.
    """
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
    """Return a message for an OSError: with the remedy for a full disk or a link, else with the path if known."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk: free some and start again, the run resumes"
    if isinstance(error, LinkError):
        return f"{error.filename} is a link: remove it, or name its target by --run-dir"
    problem = error.strerror or str(error)
    if error.filename:
        return f"{problem}: {error.filename}"
    return problem
