"""Write checkpoints from the shards of all ranks, and read parts of them.

A sharded checkpoint is a folder as in `checkpoint`. It has a file ``<group>-<rank>.safetensors`` per group and rank,
such as ``model-00003.safetensors``. Its manifest lists the pieces of each array:

    "pieces": {"model": {"w": {"dtype": "float32", "shape": [6, 4],
                               "pieces": [[0, [0, 0], [3, 4]], [1, [3, 0], [3, 4]]]}}}

A piece is [rank that wrote it, offset in the full array, shape]. Rank 0's thread writes the manifest and renames the
folder only after all ranks have written their files. Therefore a checkpoint is atomic over all ranks. At a resume at
any world size, each rank reads only the parts that it needs. To verify a checkpoint or to write full arrays, a rank
needs memory for one block of 16 MiB.

All ranks write to the same folder, which is on one machine or in a directory that all machines share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from samestep import (
    ConfigError,
    NonRetryableError,
    RemoteRankError,
    checkpoint,
    manifest,
    safetensors_layout,
    untrusted,
)
from samestep.checkpoint import Checkpoint, CorruptCheckpoint
from samestep.root import Root
from samestep.sharded import tensors
from samestep.sharded.tensors import ShardGroups, StoredGroups, StoredTensor, TensorShard
from samestep.snapshot import Snapshot

MIN_PAUSE = 0.01  # first pause in seconds between two searches for the reports of other ranks
MAX_PAUSE = 0.5  # maximum pause in seconds
SILENCE = 300.0  # seconds without a write after which a rank counts as lost
GIVE_UP = 1.0  # seconds without a write after which a failed process stops waiting
Failures = (ConfigError, NonRetryableError, RemoteRankError)
_DIGESTS = untrusted.mapping(untrusted.text(64))  # SHA-256 by file
_LENGTH = untrusted.integer(0, 2**48)  # check for the length of an array's axis

_NO_STATE = {"app": "", "step": 0, "state": {}, "arithmetic": {}}  # for ranks that write no manifest


class Collectives(Protocol):
    """The collective by which ranks exchange the locations of their parts."""

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Gather the rows of all ranks on every rank.

        Args:
            row: this rank's row [k], of any numeric dtype.

        Returns:
            The rows [world_size, k], in the order of ranks and with the same bits.
        """


# --- writing -----------------------------------------------------------------------------------------------------


def save(
    collectives: Collectives,
    rank: int,
    folder: Path,
    groups: ShardGroups,
    body: Mapping[str, Any] | None,
    keep: int = 1,
    protected_step: int | None = None,
    report: checkpoint.Report = None,
    before_commit: Callable[[], object] = lambda: None,
) -> None:
    """Save the checkpoint ``folder`` in a thread of each rank. This call is a collective.

    The call returns after this rank has copied its shards. The thread of each rank writes the rank's files, and then a
    report with their digests. Rank 0's thread waits for the reports of all ranks, writes the manifest, renames the
    folder and deletes old checkpoints, as in `checkpoint.save`. The reports are files, because a collective of a thread
    could interleave with the collectives of training.

    Args:
        collectives: the collectives of the job.
        rank: rank of this process.
        folder: final path of the checkpoint.
        groups: this rank's shards.
        body: on rank 0, the app, the step, the state and the resume invariants ("arithmetic") for `manifest.seal`;
            None on all other ranks.
        keep: number of newest checkpoints to keep.
        protected_step: step of a checkpoint that is never deleted, or None.
        report: function that logs one line if this call waits; see `checkpoint.wait_for_previous`.
        before_commit: function that rank 0's thread calls before it writes the manifest.

    Raises:
        NonRetryableError: this rank cannot save a value, or could not write the previous checkpoint. Earlier
            checkpoints remain unchanged.
        ConfigError: raised on rank 0 if the report files of other ranks are not visible.
        RemoteRankError: another rank raised NonRetryableError.
        ValueError: the ranks' shards of an array do not cover the array.
    """
    part, parts = _begin(collectives, rank, folder, groups, body, report)  # collective
    pieces = _pieces_of(parts)
    sealed = None
    if rank == 0:
        _check_shared(folder, parts)
        sealed = _seal(folder, body, _files_of(parts), pieces)
    part.copy()

    def write() -> None:
        outcome = part.write()
        if sealed is None:
            part.report(outcome)
        else:
            with checkpoint.writing(f"checkpoint {folder}", folder):
                if _collect(folder, parts, sealed, outcome):
                    before_commit()
                    checkpoint.commit(folder, sealed, keep, protected_step)
        if part.failure:
            raise part.failure

    checkpoint.submit(write, writer=rank)


def finish(collectives: Collectives, rank: int) -> None:
    """Wait until the last checkpoint is on the disk. This call is a collective.

    Args:
        collectives: the collectives of the job.
        rank: rank of this process.

    Raises:
        NonRetryableError: this rank could not write the checkpoint.
        RemoteRankError: another rank could not write the checkpoint.
    """
    failure: Exception | None = None
    try:
        checkpoint.finish(writer=rank)
    except Failures as error:
        failure = error
    _agree(collectives, failure)


def write(
    collectives: Collectives, rank: int, folder: Path, groups: ShardGroups
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write each rank's files to the temporary folder of ``folder``, without a manifest. This call is a collective.

    Args:
        collectives: the collectives of the job.
        rank: rank of this process.
        folder: final path of the checkpoint.
        groups: this rank's shards.

    Returns:
        The entries of files and pieces for a manifest.

    Raises:
        NonRetryableError: this rank could not write its files.
        RemoteRankError: another rank could not write its files.
        ValueError: the ranks' shards of an array do not cover the array.
    """
    part, parts = _begin(collectives, rank, folder, groups)  # collective
    part.copy()
    part.write()
    _agree(collectives, part.failure)
    return _files_of(parts), _pieces_of(parts)


class _Part:
    """This rank's part of a checkpoint.

    Attributes:
        entry: JSON values for the other ranks: the files' sizes, the arrays' pieces, and a token that identifies this
            save's report.
        failure: the exception if the files could not be written, else None.
    """

    def __init__(self, rank: int, folder: Path, groups: ShardGroups, body: Mapping[str, Any] | None) -> None:
        """Check the shards, compute the files' layout, and create the temporary folder.

        Raises:
            NonRetryableError: a value is invalid, or the folder cannot be created.
        """
        names = {_file_name(group, rank): {"size": 0, "sha256": ""} for group in groups}
        manifest.seal({**(body or _NO_STATE), "files": names})
        files = {}
        for group, shards in groups.items():
            for name, shard in shards.items():
                checkpoint.check_array(name, shard.values)
            files[_file_name(group, rank)] = _written_by_this_rank(shards)
        self._rank = rank
        self._folder = folder
        self._snapshot = Snapshot(files)
        self._token = os.urandom(8).hex()
        self.failure: Exception | None = None
        self.entry = {
            "files": self._snapshot.sizes,
            "pieces": {group: _describe(shards) for group, shards in groups.items()},
            "token": self._token,
        }
        temporary = checkpoint.temporary_name(folder)
        root = Root(folder.parents[1])
        with checkpoint.writing(f"checkpoint {folder}"):
            root.make_folder(temporary)
            root.create(f"{temporary}/{_report_name(rank)}").close()  # rank 0 checks that this file is visible

    def copy(self) -> None:
        """Copy the shards, so that they may change afterwards."""
        self._snapshot.copy()

    def write(self) -> dict[str, Any]:
        """Write the files, and return the report for rank 0. After a failure, the report has no digests."""
        try:
            digests = self._write_files()
        except Exception as error:  # rank 0 waits for a report, even after a failure
            self.failure = error
            return {"token": self._token}
        return {"token": self._token, "digests": digests}

    def _write_files(self) -> dict[str, str]:
        digests = {}
        with contextlib.closing(self._snapshot), checkpoint.writing(f"checkpoint {self._folder}"):
            for name, content in self._snapshot.contents.items():
                digests[name] = checkpoint.write_file(self._folder, name, content)["sha256"]
            Root(self._folder.parents[1]).sync(checkpoint.temporary_name(self._folder))
        return digests

    def report(self, outcome: Mapping[str, Any]) -> None:
        """Write the report for rank 0 to a file in the temporary folder.

        If the disk is full, delete the file, which needs no space. Otherwise, rank 0 would wait for the report.
        """
        temporary = checkpoint.temporary_of(self._folder)
        name = _report_name(self._rank)
        error = untrusted.write_json(temporary, name, outcome, self._rank)
        if error is not None:
            with contextlib.suppress(OSError):
                Root(self._folder.parents[1]).unlink(f"{checkpoint.temporary_name(self._folder)}/{name}")
            reason = f"cannot write checkpoint {self._folder}: {name}: {checkpoint.os_error_message(error)}"
            self.failure = self.failure or NonRetryableError(reason)


def _begin(
    collectives: Collectives,
    rank: int,
    folder: Path,
    groups: ShardGroups,
    body: Mapping[str, Any] | None = None,
    report: checkpoint.Report = None,
) -> tuple[_Part, list[dict[str, Any]]]:
    """Wait for the previous checkpoint, and check the values of all ranks.

    This call is a collective.

    Returns:
        This rank's part, and all ranks' entries in rank order.

    Raises:
        NonRetryableError: as in `save`.
        RemoteRankError: as in `save`.
    """
    try:
        checkpoint.wait_for_previous(folder.name, report, writer=rank)
        part = _Part(rank, folder, groups, body)
    except Failures:
        _exchange(collectives, {})  # collective, because the other ranks wait for this rank's entry
        with contextlib.suppress(OSError):
            Root(folder.parents[1]).delete(checkpoint.temporary_name(folder))
        raise
    parts = _exchange(collectives, part.entry)  # collective
    if not all(parts):
        raise RemoteRankError(1)
    return part, parts


def _exchange(collectives: Collectives, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all ranks' entries in rank order, with {} for a rank that failed. This call is a collective."""
    return [json.loads(each) for each in all_gather_bytes(collectives, json.dumps(entry).encode())]


def _agree(collectives: Collectives, failure: Exception | None) -> None:
    """Raise ``failure``, or RemoteRankError if another rank failed. This call is a collective."""
    failures = collectives.all_gather(np.array([failure is not None], np.int64))  # collective
    if failure:
        raise failure
    if failures.any():
        raise RemoteRankError(1)


def _files_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest's entries for all ranks' files, with zeros in place of digests."""
    files = {}
    for part in parts:
        for name, size in part["files"].items():
            files[name] = {"size": size, "sha256": "0" * 64}
    return files


def _pieces_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest's pieces of all arrays, by group.

    Raises:
        ValueError: a part of an array is missing.
    """
    return {group: _merge([part["pieces"][group] for part in parts]) for group in parts[0]["pieces"]}


def _check_shared(folder: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless the report files of all ranks are visible to rank 0."""
    sizes = _sizes(checkpoint.temporary_of(folder))
    for rank in range(len(parts)):
        if _report_name(rank) not in sizes:
            raise not_shared_error(folder.parents[1], f"rank 0 does not see the files of rank {rank}")


def _seal(
    folder: Path, body: Mapping[str, Any] | None, files: Mapping[str, Any], pieces: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest, with zeros in place of digests.

    Raises:
        NonRetryableError: `read` would reject the manifest.
    """
    sealed = manifest.seal({**(body or _NO_STATE), "files": files, "pieces": pieces})
    try:
        stored_in(folder, sealed["pieces"], files)
    except ValueError as error:
        reason = untrusted.shown(error, limit=200)
        raise NonRetryableError(f"cannot save checkpoint {folder}: {reason}: save arrays of numbers") from error
    return sealed


def _collect(
    folder: Path, parts: Sequence[Mapping[str, Any]], body: dict[str, Any], outcome: Mapping[str, Any]
) -> bool:
    """Wait for all ranks' reports, and add the digests to the manifest. Only rank 0's thread calls this function.

    Args:
        folder: final path of the checkpoint.
        parts: all ranks' entries.
        body: the manifest, changed in place.
        outcome: rank 0's own report.

    Returns:
        True if the checkpoint is complete. False if rank 0 could not write; this function then deletes the checkpoint's
        files. Also False if this process fails during the wait, because other ranks may have ended.

    Raises:
        RemoteRankError: another rank could not write. This function has deleted the checkpoint's files.
        NonRetryableError: a report is missing, and no rank writes for SILENCE seconds.
    """
    reports = _wait_for_reports(folder, parts, outcome)
    if reports is None:
        return False
    root = Root(folder.parents[1])
    temporary = checkpoint.temporary_name(folder)
    if not all("digests" in report for report in reports):
        root.delete(temporary)
        if "digests" in outcome:
            raise RemoteRankError(1)
        return False
    for rank, report in enumerate(reports):
        root.unlink(f"{temporary}/{_report_name(rank)}")
        for name, sha256 in report["digests"].items():
            body["files"][name]["sha256"] = sha256
    return True


def _wait_for_reports(
    folder: Path, parts: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any]
) -> list[Mapping[str, Any]] | None:
    """Return all ranks' reports in rank order; None if this process fails during the wait.

    Raises:
        NonRetryableError: no rank writes for SILENCE seconds.
    """
    reports: dict[int, Mapping[str, Any]] = {0: outcome}
    sizes: dict[str, int] = {}
    changed_at = time.monotonic()
    pause = MIN_PAUSE
    while True:
        previous_sizes = sizes
        sizes = _sizes(checkpoint.temporary_of(folder))
        _read_reports(folder, parts, reports)
        if len(reports) == len(parts):
            return [reports[rank] for rank in range(len(parts))]
        if sizes != previous_sizes:
            changed_at = time.monotonic()
        silent = time.monotonic() - changed_at
        if silent > GIVE_UP and checkpoint.process_fails.is_set():
            return None
        if silent > SILENCE:
            missing = min(set(range(len(parts))) - reports.keys())
            why = f"rank {missing} has written nothing for {SILENCE:g} s"
            raise NonRetryableError(f"cannot write checkpoint {folder}: {why}: read its log")
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file in a folder to which ranks write, by name; {} if the folder is missing."""
    sizes = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # a rank has renamed the file
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _read_reports(folder: Path, parts: Sequence[Mapping[str, Any]], reports: dict[int, Mapping[str, Any]]) -> None:
    """Add all complete reports of this save to ``reports``, by rank. Add {} for a rank that could write no report."""
    temporary = checkpoint.temporary_of(folder)
    for rank, part in enumerate(parts):
        if rank not in reports:
            path = temporary / _report_name(rank)
            report = untrusted.read_object(path)
            if not report and not path.exists() and temporary.is_dir():
                reports[rank] = {}
            digests = report.get("digests", {})
            is_complete = _DIGESTS(digests) and digests.keys() == part["files"].keys()
            if report.get("token") == part["token"] and (is_complete or "digests" not in report):
                reports[rank] = report


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


def _written_by_this_rank(shards: Mapping[str, TensorShard]) -> checkpoint.Arrays:
    return {name: shard.values for name, shard in shards.items() if shard.values.size and not shard.copy}


def _file_name(group: str, rank: int) -> str:
    return f"{group}-{rank:05d}.safetensors"


def rank_of(name: str) -> int:
    """Return the rank in the name of a shard's file; 0 for other files."""
    rank = name.removesuffix(".safetensors").rpartition("-")[2]
    return int(rank) if rank.isdecimal() else 0


def _describe(shards: Mapping[str, TensorShard]) -> dict[str, Any]:
    """Return {name: [dtype, shape of the full array, part]}.

    The part is [offset, shape] of the values that this rank writes; None if the rank writes no values of the array.
    """
    described = {}
    for name, shard in shards.items():
        piece = [shard.offset, shard.values.shape] if shard.values.size and not shard.copy else None
        described[name] = [shard.dtype.name, shard.shape, piece]
    return described


def _merge(described: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest's pieces of one group from all ranks' descriptions.

    Raises:
        ValueError: a part of an array is missing.
    """
    merged = {}
    for name, (dtype, shape, _) in described[0].items():
        pieces = [[rank, *each[name][2]] for rank, each in enumerate(described) if each[name][2]]
        if sum(math.prod(extent) for *_, extent in pieces) != math.prod(shape):
            raise ValueError(f"the ranks' pieces of {name} do not make up its shape {shape}: {pieces}")
        merged[name] = {"dtype": dtype, "shape": shape, "pieces": pieces}
    return merged


def all_gather_bytes(collectives: Collectives, content: bytes) -> list[bytes]:
    """Return every rank's ``content``, of any length, on every rank, in rank order. This call is a collective."""
    lengths = collectives.all_gather(np.array([len(content)], np.int64)).reshape(-1).tolist()
    local = np.frombuffer(content.ljust(max(lengths), b"\0"), np.uint8)
    rows = collectives.all_gather(local) if len(local) else np.empty((len(lengths), 0), np.uint8)
    return [row.tobytes()[:length] for row, length in zip(rows, lengths)]


def raise_first(collectives: Collectives, rank: int, failure: ConfigError | NonRetryableError | None) -> None:
    """Raise the error of the lowest failed rank on rank 0, and RemoteRankError on the other ranks.

    Do nothing if ``failure`` is None on all ranks. This call is a collective.

    Args:
        collectives: the collectives of the job.
        rank: rank of this process.
        failure: this rank's ConfigError or NonRetryableError, or None.
    """
    report = ""
    if failure:
        report = f"{failure.exit_code} {failure}"
    reports = [each.decode(errors="replace") for each in all_gather_bytes(collectives, report.encode(errors="replace"))]
    first = next((number for number, each in enumerate(reports) if each), None)
    if first is None:
        return
    code, _, text = reports[first].partition(" ")
    if rank != 0:
        raise RemoteRankError(int(code)) from failure
    if failure:
        raise failure
    kind = ConfigError if code == "2" else NonRetryableError
    raise kind(f"rank {first}: {text}")


def not_shared_error(run_dir: Path, why: str) -> ConfigError:
    """Return the error for a run dir that is not visible to all ranks."""
    return ConfigError(
        f"--run-dir {run_dir} is not shared by all ranks: {why}: each writes its part of the model there, so name a "
        "directory that all machines share"
    )


# --- reading -----------------------------------------------------------------------------------------------------


def read(folder: Path, verify: bool = True) -> Checkpoint:
    """Read a sharded checkpoint, and verify its files one block at a time.

    Without ``verify``, check only the manifest and the files' sizes.

    Raises:
        CorruptCheckpoint: the manifest or another file is missing, unreadable or corrupt, or of another format.
    """
    saved = checkpoint.read(folder, verify=False)
    if verify and (damage := find_damage(folder, saved.files)):
        raise CorruptCheckpoint(damage)
    stored_groups(saved)
    return saved


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any]], beat: Callable[[], None] = lambda: None) -> str:
    """Return the error of the first file that is unreadable or does not match its digest; "" if all files match.

    Args:
        folder: folder of the files.
        files: entries of the manifest by name, with ``sha256``.
        beat: function that is called after each block.
    """
    buffer = memoryview(bytearray(tensors.BLOCK))
    for name, entry in files.items():
        digest = hashlib.sha256()
        try:
            with untrusted.open_to_read(folder / name) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    beat()
        except OSError as error:
            return checkpoint.os_error_message(error)
        if digest.hexdigest() != entry["sha256"]:
            return f"{name} does not match its checksum"
    return ""


def stored_groups(saved: Checkpoint) -> StoredGroups:
    """Return the arrays of a sharded checkpoint.

    Raises:
        CorruptCheckpoint: the manifest's pieces are invalid.
    """
    try:
        return stored_in(saved.folder, saved.pieces, saved.files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = untrusted.shown(f"{type(error).__name__}: {error}", limit=200)
        raise CorruptCheckpoint(f"manifest.json has invalid locations of arrays ({problem})") from error


def stored_in(folder: Path, groups: Mapping[str, Any], files: Mapping[str, Any]) -> StoredGroups:
    """Return the arrays that a manifest describes.

    Args:
        folder: folder of the checkpoint.
        groups: the manifest's pieces, by group and array.
        files: the manifest's entries of files, by name.

    Raises:
        ValueError: a dtype, a shape or a piece is invalid, or a piece is missing. Values of other types may raise
            TypeError, KeyError or AttributeError.
    """
    stored: dict[str, dict[str, StoredTensor]] = {}
    for group, arrays in groups.items():
        stored[group] = {}
        for name, entry in arrays.items():
            shape, dtype = entry["shape"], np.dtype(str(entry["dtype"]))
            if dtype.str[1:] not in safetensors_layout.DTYPES or not all(map(_LENGTH, shape)):
                raise ValueError(f"{name} is {entry['dtype']} of shape {shape}")
            pieces = []
            for rank, offset, extent in entry["pieces"]:
                is_inside = len(offset) == len(extent) == len(shape) and all(
                    _LENGTH(begin) and _LENGTH(size) and begin + size <= length
                    for begin, size, length in zip(offset, extent, shape)
                )
                if _file_name(group, rank) not in files or not is_inside:
                    raise ValueError(f"a piece of {name} is {[rank, offset, extent]}")
                pieces.append((folder / _file_name(group, rank), tuple(offset), tuple(extent)))
            if sum(math.prod(extent) for *_, extent in pieces) != math.prod(shape):
                raise ValueError(f"pieces of {name} are missing")
            stored[group][name] = StoredTensor(name, dtype, tuple(shape), tuple(pieces))
    return stored


def stored_file(path: Path) -> dict[str, StoredTensor]:
    """Return the arrays of the safetensors file of --init-from.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    dtypes = {code: np.dtype(name) for name, code in safetensors_layout.DTYPES.items()}
    stored = {}
    try:
        if not untrusted.read_bytes(path, 1):  # rejects a FIFO, on which safe_open would block
            raise ValueError("it is empty, or no file")
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # the result of safe_open is not a mapping
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                stored[name] = StoredTensor(name, dtypes[part.get_dtype()], shape, ((path, (0,) * len(shape), shape),))
    except OSError as error:
        raise ConfigError(f"--init-from {path}: {checkpoint.os_error_message(error)}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        reason = untrusted.shown(error, limit=200)
        raise ConfigError(f"--init-from {path} is not a readable safetensors file: {reason}") from error
    return stored


def consolidate(
    arrays: Mapping[str, StoredTensor], path: Path | None = None, tick: Callable[[], Any] = lambda: None
) -> str:
    """Write full arrays to a safetensors file atomically, one block of at most 16 MiB at a time.

    Args:
        arrays: stored arrays by name.
        path: the file to write; None to compute only the digest.
        tick: function that is called after each array.

    Returns:
        The `checkpoint.weights_sha256` of the arrays.

    Raises:
        NonRetryableError: a file cannot be read or written.
    """
    digest = hashlib.sha256()
    begin, places = safetensors_layout.layout(arrays)

    def write(file: IO[bytes]) -> None:
        file.write(begin)
        for name in sorted(arrays):
            digest.update(checkpoint.digest_line(name, arrays[name]))
            file.seek(places[name])
            for block in arrays[name].blocks():
                content = block.astype(block.dtype.newbyteorder("<"), copy=False).tobytes()
                digest.update(content)
                file.write(content)
            tick()

    with checkpoint.writing(path):
        if path:
            checkpoint.write_atomic(path, write)
        else:
            with open(os.devnull, "wb") as file:
                write(file)
    return digest.hexdigest()
