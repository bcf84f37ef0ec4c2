"""Run a toy app whose ranks are processes that each hold a shard of the model, as apps of `samestep.sharded` do.

    python shards.py RANK WORLD_SIZE FOLDER [options]

Ranks communicate by files in FOLDER. All values are sums of a few powers of two, so sums are exact at any world size.
SAMESTEP_KILL=n sends SIGKILL to the process before its n-th change of the checkpoints' files and folders.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from samestep import checkpoint, log
from samestep.data import datasets
from samestep.env import World
from samestep.recovery.watchdog import Watchdog
from samestep.root import Root
from samestep.run import Parts, Run
from samestep.sharded.shards import Shards
from samestep.sharded.tensors import StoredGroups, TensorShard
from samestep.sharding import GlobalBatches
from threads import LIMIT, loss_of, parse

# Name: global shape, dtype, and the axis along which ranks shard the array. If the axis is None, each rank holds the
# full array and rank 0 saves it.
LAYOUT: dict[str, tuple[tuple[int, ...], str, int | None]] = {
    "tall": ((7, 5), "float32", 0),
    "wide": ((4, 6), "float32", 1),
    "few": ((2,), "float32", 0),  # with three or more ranks, some ranks hold no rows
    "count": ((), "float32", None),
    "scale": ((3,), "float32", None),
    "nothing": ((0, 3), "float32", 0),
}


class FileCollectives:
    """Implement the collectives that `Run` needs, through files in a folder."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._turn = 0

    def broadcast(self, content: bytes) -> bytes:
        if self._rank == 0:
            self._put(content)
        return self._take([0])[0]

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        self._put(row.tobytes())
        return np.stack([np.frombuffer(each, row.dtype) for each in self._take(range(self._world_size))])

    def _put(self, content: bytes) -> None:
        path = self._folder / f"{self._turn}-{self._rank}"
        path.with_suffix(".tmp").write_bytes(content)
        path.with_suffix(".tmp").rename(path)

    def _take(self, whose: Sequence[int]) -> list[bytes]:
        paths = [self._folder / f"{self._turn}-{rank}" for rank in whose]
        until = time.monotonic() + LIMIT
        while not all(path.exists() for path in paths):
            assert time.monotonic() < until, f"rank {self._rank} waits in vain"
            time.sleep(0.001)
        self._turn += 1
        return [path.read_bytes() for path in paths]


def part(name: str, rank: int, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and shape of a rank's shard of an array. As in torch.chunk, the last shards may be smaller."""
    shape, _, axis = LAYOUT[name]
    if axis is None:
        return (0,) * len(shape), shape
    size = -(-shape[axis] // world_size)
    begin = min(rank * size, shape[axis])
    extent = min(size, shape[axis] - begin)
    offset = tuple(begin if each == axis else 0 for each in range(len(shape)))
    return offset, tuple(extent if each == axis else length for each, length in enumerate(shape))


def whole_array(name: str, first: float = 0.0) -> NDArray[Any]:
    """Return the initial values of an array, all different, in its global shape and dtype."""
    shape, dtype, _ = LAYOUT[name]
    return (np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape) + len(name) * 100 + first).astype(dtype)


def cut(array: NDArray[Any], name: str, rank: int, world_size: int) -> TensorShard:
    """Return a rank's shard of a full array."""
    offset, extent = part(name, rank, world_size)
    values = np.array(array[tuple(slice(a, a + b) for a, b in zip(offset, extent))])
    return TensorShard(values, offset, array.shape, copy=LAYOUT[name][2] is None and rank > 0)


class Model:
    """The weights and momentum of the toy model, sharded over the ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.groups = {
            group: {name: cut(whole_array(name, first), name, rank, world_size) for name in LAYOUT}
            for group, first in (("model", 0.0), ("optimizer", 0.5))
        }

    def load(self, shards: StoredGroups) -> None:
        for group, arrays in shards.items():
            difference = checkpoint.state_dict_diff(arrays, self.groups[group])
            if difference:
                raise ValueError(difference)
            for name, piece in self.groups[group].items():
                piece.values[...] = arrays[name].read(piece.offset, piece.values.shape)

    def update(self, gradient: float) -> None:
        for name, momentum in self.groups["optimizer"].items():
            momentum.values[...] = momentum.values / 2 + gradient
            self.groups["model"][name].values[...] -= momentum.values / 64


def main() -> None:
    rank = int(sys.argv[1])
    world_size = int(sys.argv[2])
    folder = Path(sys.argv[3])
    options = parse(*sys.argv[4:])
    ranks = FileCollectives(folder, rank, world_size)
    model = Model(rank, world_size)
    run = Run("sharded toy", options, World(rank, world_size), Watchdog(), datasets.resolve, Shards())
    run.restore(ranks, Parts(model.load, lambda: model.groups))
    n = len(datasets.load(options.dataset, options.data_dir).train_labels)
    batches = GlobalBatches(n, options.global_batch_size, options.seed, rank, world_size)
    run.start(batches, 6, "toy", "cpu", {"numpy": np.__version__})
    for step in range(run.first_step, run.last_step):
        loss_sum = sum((loss_of(int(sample), step) for sample in batches.indices(step)), 0.0)  # possibly an empty sum
        model.update(float(np.round(ranks.all_gather(np.array([loss_sum])).sum())))
        actions = run.after_step(loss_sum)
        if actions.sync:
            actions = run.sync()
        if actions.log:
            run.log_metrics({"test_loss": 1.0 + step % 3, "test_examples": 6} if actions.evaluate else {})
        if actions.save:
            run.save()
    run.finish(run.eval_metrics or {"test_loss": 1.0, "test_examples": 6})
    run.report("numpy", np.__version__, "files", "cpu")


def kill_at(count: int) -> None:
    """Kill this process before its ``count``-th change of the checkpoints' files and folders, counted from 1."""
    seen = 0

    def note() -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def note_calls(method: str) -> None:
        change = getattr(Root, method)

        def note_and_change(self: Root, name: str, *arguments: Any, **options: Any) -> Any:
            if name.startswith("checkpoints/"):
                note()
            return change(self, name, *arguments, **options)

        setattr(Root, method, note_and_change)

    for method in ("make_folder", "create", "rename"):
        note_calls(method)
    sys.addaudithook(lambda event, arguments: note() if event == "os.rmdir" else None)


def start(
    world_size: int, folder: Path, *options: str, environ: Mapping[int, Mapping[str, str]] | None = None
) -> list[subprocess.Popen[str]]:
    """Start one process per rank. ``folder`` must be new; ``environ`` adds variables to the environment of a rank."""
    folder.mkdir()
    paths = os.pathsep.join([str(Path(checkpoint.__file__).parents[1]), str(Path(__file__).parent)])
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world_size), str(folder), *options],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environ or {}).get(rank, {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def end(processes: Sequence[subprocess.Popen[str]], limit: float = LIMIT) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each rank. Kill all ranks after a kill of one, or after ``limit`` s."""
    until = time.monotonic() + limit
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if any(process.poll() == -signal.SIGKILL for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.005)
    for process in processes:
        process.kill()
    found = [process.communicate() for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, found)]


if __name__ == "__main__":
    if "SAMESTEP_KILL" in os.environ:
        kill_at(int(os.environ["SAMESTEP_KILL"]))
    log.run(main)
