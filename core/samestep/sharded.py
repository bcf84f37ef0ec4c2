"""What survives of a model that no rank holds? Checkpoints of which each rank writes a shard, and reads any part.

A sharded checkpoint is a folder as `checkpoint` describes, but has a file ``<group>-<rank>.safetensors`` for each group
and each rank that wrote it, such as ``model-00003.safetensors``, and its manifest also names the pieces of each array:

    "pieces": {"model": {"w": {"dtype": "float32", "shape": [6, 4],
                               "pieces": [[0, [0, 0], [3, 4]], [1, [3, 0], [3, 4]]]}}}

where a piece is the rank that wrote it, where it begins in the whole, and its shape. All ranks' files are on the disk
before rank 0 writes the manifest and gives the folder its name, so that a checkpoint is whole over all ranks, or is
none. Pieces are those of the ranks that saved; whoever reads asks for the parts that it needs, whatever ranks there are
now. Nothing here holds more than what is asked for, or a block of 16 MB.

All ranks write into one folder: on one machine, or in a directory that all machines share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from samestep import FatalError, RankZeroError, UserError, checkpoint, log, safetensors_writer
from samestep.checkpoint import Checkpoint, Damaged
from samestep.run import Ranks, Run
from samestep.safetensors_writer import encode

BLOCK = 16 * 2**20  # bytes that are read at a time
SEEN = 5.0  # seconds within which another machine sees a file in a directory that it shares
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """What a rank holds of an array: ``values``, which begin at ``offset`` in an array of ``shape``; may be empty."""

    values: NDArray[Any]
    offset: Shape
    shape: Shape
    copy: bool = False  # another rank holds, and writes, the same

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype


@dataclass(frozen=True)
class Stored:
    """An array in files, of which any part can be read; ``pieces`` are (file, offset, shape)."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    pieces: tuple[tuple[Path, Shape, Shape], ...]

    def read(self, offset: Shape | None = None, shape: Shape | None = None) -> NDArray[Any]:
        """The part of ``shape`` that begins at ``offset``; by default all. Raises FatalError."""
        offset = (0,) * len(self.shape) if offset is None else offset
        shape = self.shape if shape is None else shape
        found = np.empty(shape, self.dtype)
        for path, begin, extent in self.pieces:
            low = [max(pair) for pair in zip(offset, begin)]
            high = [min(a + b, c + d) for a, b, c, d in zip(offset, shape, begin, extent)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            try:  # opened for each piece, so that what was mapped of the file is not kept in memory
                with safe_open(path, framework="numpy") as file:
                    its = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, begin))
                    part = file.get_slice(self.name)[its] if its else file.get_tensor(self.name)
                found[tuple(slice(a - c, b - c) for a, b, c in zip(low, high, offset))] = part
            except (OSError, SafetensorError, ValueError) as error:
                raise FatalError(f"{path}: {self.name} cannot be read: {error}") from error
        return found

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All of it in C order, in parts of at most BLOCK bytes. Raises FatalError."""
        for offset, shape in _cut((0,) * len(self.shape), self.shape, max(1, BLOCK // self.dtype.itemsize)):
            yield self.read(offset, shape)


Pieces = Mapping[str, Mapping[str, Piece]]  # by group and by name: what a rank holds, the same names on every rank
Shards = Mapping[str, Mapping[str, Stored]]  # by group and by name: what can be read


# --- writing -----------------------------------------------------------------------------------------------------


def save(
    ranks: Ranks,
    rank: int,
    folder: Path,
    groups: Pieces,
    body: Mapping[str, Any] | None,
    keep: int = 1,
    spare: int | None = None,
) -> None:
    """Write the checkpoint ``folder``; every rank calls this, and returns when all ranks' files are on the disk.

    Rank 0's ``body`` has the app, the step, the state and the arithmetic; what is left to it, the manifest, the name
    and the deletion of old checkpoints, is a thread's work, as in `checkpoint.save`, and `checkpoint.finish` waits for
    it. Raises FatalError on a rank that cannot write, and RankZeroError on all others; earlier ones are then untouched.
    """
    checkpoint.finish()
    files, pieces = write(ranks, rank, folder, groups)
    if rank == 0:
        try:
            if lacking := [name for name in files if not (checkpoint.temporary_of(folder) / name).exists()]:
                raise _not_shared(folder.parents[1], f"{lacking[0]}, which a rank wrote, is not there for rank 0")
            body = {"format": checkpoint.FORMAT, "files": files, "pieces": pieces, **(body or {})}
            checkpoint.seal(folder, [], body, keep, spare)
        except OSError as error:
            raise checkpoint.not_written(folder, [], error) from error


def write(ranks: Ranks, rank: int, folder: Path, groups: Pieces) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each rank's files, on the disk, in the temporary of ``folder``; returns what a manifest says of all of them."""
    temporary, failed, told = checkpoint.temporary_of(folder), None, dict[str, Any]()
    written: list[IO[bytes]] = []
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        files = {}
        for group, pieces in groups.items():
            mine = {name: piece.values for name, piece in pieces.items() if piece.values.size and not piece.copy}
            written.append((temporary / _file(group, rank)).open("xb"))
            files[_file(group, rank)] = checkpoint.write_file(written[-1], encode(mine))
        for file in written:
            os.fsync(file.fileno())
            file.close()
        checkpoint.sync_folder(temporary)
        told = {"files": files, "pieces": {group: _describe(pieces) for group, pieces in groups.items()}}
    except OSError as error:
        failed = error
    everyones = [json.loads(each) for each in exchange(ranks, json.dumps(told).encode())]  # nobody returns before all
    if failed:
        raise checkpoint.not_written(folder, written, failed) from failed
    if not all(everyones):
        raise RankZeroError(1)
    all_files = {name: facts for each in everyones for name, facts in each["files"].items()}
    return all_files, {group: _merged([each["pieces"][group] for each in everyones]) for group in groups}


def _file(group: str, rank: int) -> str:
    return f"{group}-{rank:05d}.safetensors"


def _rank_of(name: str) -> int:
    """Of a shard's file; 0 where it is none."""
    found = name.removesuffix(".safetensors").rpartition("-")[2]
    return int(found) if found.isdecimal() else 0


def _describe(pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """What this rank tells of each array: its dtype, the shape of the whole, and the piece that it wrote, or None."""
    told = {}
    for name, piece in pieces.items():
        wrote = [piece.offset, piece.values.shape] if piece.values.size and not piece.copy else None
        told[name] = [piece.dtype.name, piece.shape, wrote]
    return told


def _merged(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's entries for the arrays of one group, of what all ranks told. Raises ValueError for a gap."""
    found = {}
    for name, (dtype, shape, _) in told[0].items():
        pieces = [[rank, *each[name][2]] for rank, each in enumerate(told) if each[name][2]]
        if sum(math.prod(extent) for *_, extent in pieces) != math.prod(shape):
            raise ValueError(f"the ranks' pieces of {name} do not make up its shape {shape}: {pieces}")
        found[name] = {"dtype": dtype, "shape": shape, "pieces": pieces}
    return found


def exchange(ranks: Ranks, content: bytes) -> list[bytes]:
    """Every rank's ``content``, of any length, on every rank."""
    lengths = ranks.all_gather(np.array([len(content)], np.int64)).reshape(-1).tolist()
    mine = np.frombuffer(content.ljust(max(lengths), b"\0"), np.uint8)
    rows = ranks.all_gather(mine) if len(mine) else np.empty((len(lengths), 0), np.uint8)
    return [row.tobytes()[:length] for row, length in zip(rows, lengths)]


# --- reading -----------------------------------------------------------------------------------------------------


def read(folder: Path, verify: bool = True) -> Checkpoint:
    """As `checkpoint.read`, of a sharded checkpoint, without holding what is in its files. Raises Damaged."""
    found = checkpoint.read(folder, verify=False)
    if verify and (damage := find_damage(folder, found.files)):
        raise Damaged(damage)
    shards_of(found)
    return found


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any]], beat: Callable[[], None] = lambda: None) -> str:
    """What is wrong with the first of ``files`` that is not what its digest says; "" where all are good."""
    buffer = memoryview(bytearray(BLOCK))
    for name, facts in files.items():
        digest = hashlib.sha256()
        try:
            with (folder / name).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    beat()
        except OSError as error:
            return checkpoint.reason(error)
        if digest.hexdigest() != facts["sha256"]:
            return f"{name} does not match its checksum"
    return ""


def shards_of(found: Checkpoint) -> Shards:
    """The arrays of a sharded checkpoint. Raises Damaged where its manifest does not make sense."""
    try:
        return stored_in(found.folder, found.pieces, found.files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"manifest.json does not say where arrays are ({type(error).__name__}: {error})") from error


def stored_in(folder: Path, groups: Mapping[str, Any], files: Mapping[str, Any]) -> Shards:
    """The arrays that ``groups``, a manifest's pieces, describes, in ``files`` of ``folder``."""
    shards: dict[str, dict[str, Stored]] = {}
    for group, arrays in groups.items():
        shards[group] = {}
        for name, its in arrays.items():
            pieces = []
            for rank, offset, extent in its["pieces"]:
                if _file(group, rank) not in files or not len(offset) == len(extent) == len(its["shape"]):
                    raise ValueError(f"a piece of {name} is {[rank, offset, extent]}")
                pieces.append((folder / _file(group, rank), tuple(offset), tuple(extent)))
            if sum(math.prod(extent) for *_, extent in pieces) != math.prod(its["shape"]):
                raise ValueError(f"pieces of {name} are missing")
            shards[group][name] = Stored(name, np.dtype(its["dtype"]), tuple(its["shape"]), tuple(pieces))
    return shards


_DTYPES = {code: np.dtype(name) for name, code in safetensors_writer.DTYPES.items()}


def stored_file(path: Path) -> dict[str, Stored]:
    """The arrays of one safetensors file of whole arrays. Raises UserError when it is missing or not one."""
    found = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                its = file.get_slice(name)
                shape = tuple(its.get_shape())
                found[name] = Stored(name, _DTYPES[its.get_dtype()], shape, ((path, (0,) * len(shape), shape),))
    except OSError as error:
        raise UserError(f"--init-from {path}: {checkpoint.reason(error)}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"--init-from {path} is not a readable safetensors file: {error}") from error
    return found


def gather(arrays: Mapping[str, Stored], path: Path | None = None, tick: Callable[[], Any] = lambda: None) -> str:
    """The `checkpoint.weights_sha256` of ``arrays``, and, at ``path``, the safetensors file of them, whole or not at
    all: read once, a block of 16 MB at a time. ``tick`` is called after each array. Raises FatalError."""
    digest = hashlib.sha256()
    begin, places = safetensors_writer.layout(arrays)
    temporary = path.with_name(f".{path.name}.tmp") if path else Path(os.devnull)
    try:
        with temporary.open("wb") as file:
            file.write(begin)
            for name in sorted(arrays):
                digest.update(checkpoint.digest_line(name, arrays[name]))
                file.seek(places[name])
                for block in arrays[name].blocks():
                    content = block.astype(block.dtype.newbyteorder("<"), copy=False).tobytes()
                    digest.update(content)
                    file.write(content)
                tick()
            if path:
                file.flush()
                os.fsync(file.fileno())
        if path:
            temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink() if path else None
        raise FatalError(f"cannot write {path}: {checkpoint.reason(error)}") from error
    return digest.hexdigest()


def _cut(offset: Shape, shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Parts (offset, shape) of a part, in C order, each of at most ``most`` elements."""
    size = math.prod(shape)
    axis = next((axis for axis, length in enumerate(shape) if length > 1), None)
    if size <= most or axis is None:
        yield offset, shape
        return
    rows = max(1, shape[axis] * most // size)
    for first in range(0, shape[axis], rows):
        at, count = offset[axis] + first, min(rows, shape[axis] - first)
        yield from _cut((*offset[:axis], at, *offset[axis + 1 :]), (*shape[:axis], count, *shape[axis + 1 :]), most)


# --- the run -----------------------------------------------------------------------------------------------------


class ShardedRun(Run):
    """A `Run` of a model that is sharded over the ranks: `restore` gives `Shards`, and `save` and `finish` take pieces.

    Ranks hold no copies of each other's weights, so that nothing can be compared: what differs from the other apps.
    """

    _held_in: Path | None = None  # the checkpoint that holds what the ranks hold
    _shared = False

    def restore(self, ranks: Ranks, load: Callable[[Shards], None]) -> None:  # type: ignore[override]
        """Rank 0 resolves run dir, data set and checkpoint or --init-from; each rank loads the parts that it needs.

        All ranks verify a checkpoint's files, each its share, before any is used. ``load`` is called as
        `Run.restore`'s, on every rank, with what can be read of each array. Raises as that does.
        """
        self.watchdog.collectives = getattr(ranks, "collectives", None)
        problem: Exception | None = None
        if self.world.rank == 0:
            try:
                answer = self._resolve(ranks)
            except (UserError, FatalError) as caught:
                problem, answer = caught, {"exit_code": 2 if isinstance(caught, UserError) else 1}
            ranks.broadcast(json.dumps(answer).encode())
        else:
            while "ask" in (answer := json.loads(ranks.broadcast(b""))):
                self._answer(ranks, answer)
        if problem:
            raise problem
        if "exit_code" in answer:
            raise RankZeroError(answer["exit_code"])
        try:
            self._load(answer, load)
        except (UserError, FatalError) as caught:
            if self.world.rank == 0:
                raise
            raise RankZeroError(2 if isinstance(caught, UserError) else 1) from caught  # all ranks find the same
        self._go_on(answer)

    def _resolve(self, ranks: Ranks) -> dict[str, Any]:
        """Rank 0: what all ranks are to know."""
        from samestep import rundir  # the others need none of it

        def reader(folder: Path, verify: bool) -> Checkpoint:
            found = read(folder, verify=False)
            self._check_shared(ranks, folder.parents[1])
            damages = self._ask(ranks, {"ask": "damage", "folder": str(folder), "files": found.files})
            if damage := next(filter(None, damages), None):
                raise Damaged(damage)
            return found

        fresh = not self.world.restart_count
        resolved = rundir.resolve(self.app, self.options, fresh=fresh, reader=reader)
        self._check_shared(ranks, resolved.run_dir)
        with contextlib.suppress(OSError):  # what is in a checkpoint's way is told when it is written
            checkpoint.clear(resolved.run_dir)
        found = resolved.checkpoint
        return {**rundir.answer(resolved), "folder": str(found.folder) if found else None}

    def _check_shared(self, ranks: Ranks, run_dir: Path) -> None:
        """Rank 0: raise UserError where a rank does not see the run dir as it is here."""
        if self._shared:
            return
        token = run_dir / f".shared-{os.urandom(8).hex()}"
        try:
            token.touch()
        except OSError as error:
            raise UserError(f"cannot use --run-dir {run_dir}: {error.strerror}") from error
        blind = list(filter(None, self._ask(ranks, {"ask": "see", "file": str(token)})))
        token.unlink(missing_ok=True)
        if blind:
            raise _not_shared(run_dir, f"{', '.join(blind)} does not see what rank 0 ({socket.gethostname()}) does")
        self._shared = True

    def _ask(self, ranks: Ranks, question: dict[str, Any]) -> list[str]:
        """Rank 0: every rank's answer, in the order of ranks."""
        ranks.broadcast(json.dumps(question).encode())
        return self._answer(ranks, question)

    def _answer(self, ranks: Ranks, question: Mapping[str, Any]) -> list[str]:
        """What is wrong for this rank, "" where nothing is; returns all ranks'."""
        rank, text = self.world.rank, ""
        if question["ask"] == "see":
            until = time.monotonic() + SEEN
            while not (seen := os.path.exists(question["file"])) and time.monotonic() < until:
                time.sleep(0.1)
            text = "" if seen else f"rank {rank} ({socket.gethostname()})"
        else:
            mine = [name for name in question["files"] if _rank_of(name) % self.world.world_size == rank]
            share = {name: question["files"][name] for name in mine}
            text = find_damage(Path(question["folder"]), share, self.watchdog.beat)
        return [each.decode(errors="replace") for each in exchange(ranks, text.encode(errors="replace"))]

    def _load(self, answer: Mapping[str, Any], load: Callable[[Shards], None]) -> None:
        folder, init_from = answer["folder"], self.options.init_from
        shards: Shards = {}
        if folder:
            self._held_in = Path(folder)
            shards = shards_of(checkpoint.read(self._held_in, verify=False))
            if init_from and self.world.rank == 0:
                log.info(f"{self._held_in.name} of the run dir wins over --init-from {init_from}")
        elif init_from:
            shards = {"model": stored_file(init_from)}
        try:
            if shards:
                load(shards)
        except ValueError as problem:
            from samestep import rundir

            raise rundir.misfit(folder, init_from, problem) from problem

    def save(self, ranks: Ranks, groups: Pieces) -> None:  # type: ignore[override]
        """Write a checkpoint of the updates recorded last; every rank calls this, and writes what it holds."""
        folder = checkpoint.folder_of(self.options.run_dir, self._step)
        body, kept = None, tuple[Any, ...]()
        if self._metrics:
            state, arithmetic, *kept = self._vouched(self._metrics)  # type: ignore[assignment]
            body = {"app": self.app, "step": self._step, "state": state, "arithmetic": arithmetic}
        save(ranks, self.world.rank, folder, groups, body, *kept)
        self._held_in = folder
        self._stop(ranks)

    def finish(  # type: ignore[override]
        self, ranks: Ranks, weights: Mapping[str, Piece], tested: Mapping[str, Any], also: Pieces | None = None
    ) -> None:
        """Write the weights, and what there is ``also``, a block at a time; every rank calls this. Raises as `save`."""
        super().finish(ranks, weights, tested, also)  # type: ignore[arg-type]

    def _leave_weights(self, ranks: Ranks, weights: Any, also: Any) -> tuple[str, dict[str, Any]]:
        """From the checkpoint that holds them, by rank 0, while the others hear that it goes on."""
        run_dir, digest, best = self.options.run_dir, "", dict[str, Any]()
        folder = self._held_in
        if folder is None:  # nothing was restored, and nothing trained
            temporary = checkpoint.folder_of(run_dir, self.stop)
            files, pieces = write(ranks, self.world.rank, temporary, {"model": weights, **also})

        def tick() -> None:
            self.watchdog.beat()
            ranks.broadcast(b".")

        def copy(folder: Path, group: str, path: Path) -> None:
            gather(shards_of(read(folder))[group], path, tick)

        if self.world.rank == 0:
            checkpoint.finish()
            if folder:
                shards = shards_of(checkpoint.read(folder, verify=False))
            else:
                shards = stored_in(checkpoint.temporary_of(temporary), pieces, files)
            for name in ("model", *also):
                path = run_dir / f"{name if name == 'model' else f'model-{name}'}.safetensors"
                found = gather(shards[name], path if self._metrics else None, tick)
                digest = found if name == "model" else digest
            if self._best and self.options.keep_best:
                best = self._best.write(run_dir, self.evaluates, copy)
            if not folder:
                checkpoint.clear(run_dir)
            ranks.broadcast(digest.encode())
        else:
            while (heard := ranks.broadcast(b"")) == b".":
                self.watchdog.beat()
            digest = heard.decode()
        return digest, best


def _not_shared(run_dir: Path, why: str) -> UserError:
    return UserError(
        f"--run-dir {run_dir} is not shared by all ranks: {why}: each writes its part of the model there, so name a "
        "directory that all machines share"
    )
