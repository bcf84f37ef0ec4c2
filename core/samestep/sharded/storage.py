"""Write checkpoints, a shard from each rank, and read any part of them.

A sharded checkpoint is a folder as in `checkpoint`. It has a file ``<group>-<rank>.safetensors`` per group and rank,
such as ``model-00003.safetensors``, and its manifest names the pieces of each array:

    "pieces": {"model": {"w": {"dtype": "float32", "shape": [6, 4],
                               "pieces": [[0, [0, 0], [3, 4]], [1, [3, 0], [3, 4]]]}}}

A piece is the rank that wrote it, its offset in the whole array, and its shape. All ranks' files are on the disk before
rank 0 writes the manifest and gives the folder its name, so a checkpoint is atomic over all ranks. A reader asks for
the parts that it needs, at any number of ranks. Reading holds no more than these, or a block of 16 MB.

All ranks write into one folder: on one machine, or in a directory that all machines share.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, manifest, untrusted
from samestep.checkpoint import Checkpoint, CorruptCheckpoint
from samestep.root import Root
from samestep.sharded import safetensors_layout, tensors
from samestep.sharded.tensors import ShardGroups, StoredGroups, StoredTensor, TensorShard

_LENGTH = untrusted.integer(0, 2**48)  # of an array's axis

_NO_STATE = {"app": "", "step": 0, "state": {}, "arithmetic": {}}  # of a rank that writes no manifest


class Collectives(Protocol):
    """The function by which ranks exchange the locations of their parts."""

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Return every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""


# --- writing -----------------------------------------------------------------------------------------------------


def save(
    collectives: Collectives,
    rank: int,
    folder: Path,
    groups: ShardGroups,
    body: Mapping[str, Any] | None,
    keep: int = 1,
    protected_step: int | None = None,
) -> None:
    """Write the checkpoint ``folder``; every rank calls this, and returns when all ranks' files are on the disk.

    Rank 0's ``body`` has the app, the step, the state and the resume invariants (arithmetic), with the values that
    `manifest.seal` allows. A thread writes the manifest, renames the folder and deletes old checkpoints, as in
    `checkpoint.save`; `checkpoint.finish` waits for it. Raises NonRetryableError on a rank that cannot write, and
    RemoteRankError on all others; earlier ones are then untouched.
    """
    checkpoint.finish()
    files, pieces = write(collectives, rank, folder, groups, body)
    if rank != 0:
        return
    if lacking := [name for name in files if not (checkpoint.temporary_of(folder) / name).exists()]:
        raise not_shared_error(folder.parents[1], f"{lacking[0]}, which a rank wrote, is not there for rank 0")
    sealed = manifest.seal({**(body or _NO_STATE), "files": files, "pieces": pieces})
    try:
        stored_in(folder, sealed["pieces"], files)
    except ValueError as error:
        reason = untrusted.shown(error, limit=200)
        raise NonRetryableError(f"cannot save checkpoint {folder}: {reason}: save arrays of numbers") from error

    def commit() -> None:
        with checkpoint.writing(f"checkpoint {folder}", folder):
            checkpoint.commit(folder, sealed, keep, protected_step)

    checkpoint.submit(commit)


def write(
    collectives: Collectives, rank: int, folder: Path, groups: ShardGroups, body: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write each rank's files in the temporary folder of ``folder``; return all ranks' entries of the manifest.

    Rank 0 checks ``body``, and each rank the names of groups, before any rank waits for another. Raises as `save`.
    """
    failed: OSError | NonRetryableError | None = None
    entries: dict[str, Any] = {}
    try:
        names = {_file_name(group, rank): {"size": 0, "sha256": ""} for group in groups}
        manifest.seal({**(body or _NO_STATE), "files": names})
        for shards in groups.values():
            for name, shard in shards.items():
                checkpoint.check_array(name, shard.values)
        files = _write_files(rank, folder, groups)
        entries = {"files": files, "pieces": {group: _describe(shards) for group, shards in groups.items()}}
    except (OSError, NonRetryableError) as error:
        failed = error
    # No rank returns, or deletes anything, before all have written.
    gathered = [json.loads(entry) for entry in all_gather_bytes(collectives, json.dumps(entries).encode())]
    if failed:
        with checkpoint.writing(f"checkpoint {folder}", folder):
            raise failed
    if not all(gathered):
        raise RemoteRankError(1)
    all_files = {name: entry for rank_entries in gathered for name, entry in rank_entries["files"].items()}
    return all_files, {group: _merge([rank_entries["pieces"][group] for rank_entries in gathered]) for group in groups}


def _write_files(rank: int, folder: Path, groups: ShardGroups) -> dict[str, Any]:
    """Write this rank's files; return their entries of the manifest. Raises OSError or NonRetryableError."""
    root, temporary = Root(folder.parents[1]), checkpoint.temporary_name(folder)
    root.make_folder(temporary)
    files = {}
    for group, shards in groups.items():
        content = checkpoint.serialize(_written_by_this_rank(shards))
        files[_file_name(group, rank)] = checkpoint.write_file(folder, _file_name(group, rank), content)
    root.sync(temporary)
    return files


def _written_by_this_rank(shards: Mapping[str, TensorShard]) -> checkpoint.Arrays:
    return {name: shard.values for name, shard in shards.items() if shard.values.size and not shard.copy}


def _file_name(group: str, rank: int) -> str:
    return f"{group}-{rank:05d}.safetensors"


def rank_of(name: str) -> int:
    """Return the rank that wrote a shard's file; 0 if it is not one."""
    rank = name.removesuffix(".safetensors").rpartition("-")[2]
    return int(rank) if rank.isdecimal() else 0


def _describe(shards: Mapping[str, TensorShard]) -> dict[str, Any]:
    """Return for each array its dtype, the shape of the whole, and the piece that this rank wrote, or None."""
    described = {}
    for name, shard in shards.items():
        piece = [shard.offset, shard.values.shape] if shard.values.size and not shard.copy else None
        described[name] = [shard.dtype.name, shard.shape, piece]
    return described


def _merge(described: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest's entries for one group from all ranks' `_describe`. Raises ValueError for a gap."""
    merged = {}
    for name, (dtype, shape, _) in described[0].items():
        pieces = [[rank, *each[name][2]] for rank, each in enumerate(described) if each[name][2]]
        if sum(math.prod(extent) for *_, extent in pieces) != math.prod(shape):
            raise ValueError(f"the ranks' pieces of {name} do not make up its shape {shape}: {pieces}")
        merged[name] = {"dtype": dtype, "shape": shape, "pieces": pieces}
    return merged


def all_gather_bytes(collectives: Collectives, content: bytes) -> list[bytes]:
    """Return every rank's ``content``, of any length, on every rank."""
    lengths = collectives.all_gather(np.array([len(content)], np.int64)).reshape(-1).tolist()
    local = np.frombuffer(content.ljust(max(lengths), b"\0"), np.uint8)
    rows = collectives.all_gather(local) if len(local) else np.empty((len(lengths), 0), np.uint8)
    return [row.tobytes()[:length] for row, length in zip(rows, lengths)]


def not_shared_error(run_dir: Path, why: str) -> ConfigError:
    """Return the error for a run dir that some rank does not see."""
    return ConfigError(
        f"--run-dir {run_dir} is not shared by all ranks: {why}: each writes its part of the model there, so name a "
        "directory that all machines share"
    )


# --- reading -----------------------------------------------------------------------------------------------------


def read(folder: Path, verify: bool = True) -> Checkpoint:
    """Read a sharded checkpoint as `checkpoint.read` does, without holding its files. Raises CorruptCheckpoint."""
    saved = checkpoint.read(folder, verify=False)
    if verify and (damage := find_damage(folder, saved.files)):
        raise CorruptCheckpoint(damage)
    stored_groups(saved)
    return saved


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any]], beat: Callable[[], None] = lambda: None) -> str:
    """Return the error of the first of ``files`` that does not match its digest; "" if all are good."""
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
    """Return the arrays of a sharded checkpoint. Raises CorruptCheckpoint if its manifest makes no sense."""
    try:
        return stored_in(saved.folder, saved.pieces, saved.files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = untrusted.shown(f"{type(error).__name__}: {error}", limit=200)
        raise CorruptCheckpoint(f"manifest.json has invalid locations of arrays ({problem})") from error


def stored_in(folder: Path, groups: Mapping[str, Any], files: Mapping[str, Any]) -> StoredGroups:
    """Return the arrays that ``groups``, a manifest's pieces, describes, in ``files`` of ``folder``."""
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
    """Return the arrays of one safetensors file of whole arrays. Raises ConfigError if it is missing or not one."""
    dtypes = {code: np.dtype(name) for name, code in safetensors_layout.DTYPES.items()}
    stored = {}
    try:
        if not untrusted.read_bytes(path, 1):  # to open a FIFO would block
            raise ValueError("it is empty, or no file")
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # it is not a mapping
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
    """Return the `checkpoint.weights_sha256` of ``arrays``, and write them atomically to the safetensors file ``path``.

    It reads once, a block of 16 MB at a time, and calls ``tick`` after each array. Raises NonRetryableError.
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
