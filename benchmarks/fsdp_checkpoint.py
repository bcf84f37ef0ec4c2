"""Measure how long a sharded checkpoint delays gpt_fsdp's step, compared with plain writes of each rank's bytes.

    OMP_NUM_THREADS=1 .venvs/gpt_fsdp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/fsdp_checkpoint.py [--rounds 15] [--dir FOLDER]

Two variants take turns on all ranks, on the same disk (--dir; by default a temporary folder under runs/):

- save: Each rank does the work of `Shards.save` between two steps. It copies its parts of the model and the optimizer,
  and exchanges the lists of their contents with the other ranks. A thread of each rank then hashes, writes and syncs
  the rank's files. Rank 0's thread waits for all ranks, writes the manifest, renames the folder and deletes the older
  of the two earlier checkpoints. In the app, training continues meanwhile. The column *whole* has the time until the
  thread has finished.

- plain: Each rank writes and syncs the same number of files of the same sizes, without an exchange.

Times are milliseconds of the slowest rank, as medians and quartiles. A ratio compares the two variants of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "gpt_fsdp")]
import distributed  # noqa: E402
import train  # noqa: E402
import weights  # noqa: E402
from arguments import at_least  # noqa: E402
from model import build_model  # noqa: E402
from options import parse  # noqa: E402
from samestep import checkpoint  # noqa: E402
from samestep.sharded import storage  # noqa: E402

CPU = torch.device("cpu")
MODELS = (["--layers=4", "--width=256", "--heads=8"], ["--layers=8", "--width=512", "--heads=8"])


def longest(seconds: float) -> float:
    """Return the largest of all ranks' durations, in milliseconds."""
    taken = torch.tensor([1000 * seconds], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(options: list[str], rounds: int, folder: Path) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of this rank's files, and the milliseconds of each variant in each round."""
    asked = parse(options)
    rank = dist.get_rank()
    mesh = distributed.make_mesh(asked, CPU)
    model = build_model(asked, torch.float32, mesh)
    optimizer = train.build_optimizer(asked, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # this step creates the optimizer's state
    saved = [checkpoint.folder_of(folder, 0)]

    def save() -> None:
        saved.append(checkpoint.folder_of(folder, len(saved)))
        groups = weights.groups(model, optimizer, mesh)
        body = {"app": "benchmark", "step": len(saved) - 1, "state": {}, "arithmetic": {}}
        storage.save(distributed, rank, saved[-1], groups, body if rank == 0 else None, keep=2)

    for _ in range(3):
        save()
    checkpoint.finish()
    dist.barrier()
    contents = [path.read_bytes() for path in sorted(saved[-1].glob(f"*-{rank:05d}.safetensors"))]
    place = folder / f"others-{rank}"

    def plain() -> None:
        for number, content in enumerate(contents):
            with (place / str(number)).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    contestants: dict[str, Callable[[], object]] = {"save": save, "plain": plain}
    taken: dict[str, list[float]] = {name: [] for name in (*contestants, "whole")}
    for number in range(rounds):
        for name in list(contestants)[:: 1 if number % 2 else -1]:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            os.sync()  # so that no variant waits for the writes of the previous variant
            dist.barrier()
            begun = time.perf_counter()
            contestants[name]()
            taken[name].append(longest(time.perf_counter() - begun))
            if name == "save":
                checkpoint.finish()
                taken["whole"].append(longest(time.perf_counter() - begun))
    return sum(map(len, contents)), taken


def shown(values: list[float], digits: int) -> str:
    """Return the median and the quartiles of ``values`` as text."""
    first, median, third = statistics.quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return f"{median:,.{digits}f} ({first:,.{digits}f} to {third:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=15, help="(default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="on the disk to be measured (default: under the repository's runs/)")
    parser.add_argument("--quick", action="store_true", help="one round of the smaller model: that it still runs")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as above")
    distributed.release_memory_early()
    dist.init_process_group("gloo")
    above = given.dir or ROOT / "runs"
    above.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        rounds = 1 if given.quick else given.rounds
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}, {rounds} rounds, ms\n")
        print("| model | bytes a rank | save | whole | plain | save / plain |\n|---|---|---|---|---|---|", flush=True)
    for options in MODELS[:1] if given.quick else MODELS:
        with contextlib.ExitStack() as stack:
            made = ""
            if dist.get_rank() == 0:
                made = stack.enter_context(tempfile.TemporaryDirectory(dir=above, prefix="benchmark-"))
            folder = Path(distributed.broadcast(made.encode()).decode())
            size, taken = measure(options, 1 if given.quick else given.rounds, folder)
            dist.barrier()  # after the barrier, rank 0 deletes the folder
        if dist.get_rank() == 0:
            cells = [" ".join(options), f"{size:,.0f}", *(shown(taken[name], 1) for name in ("save", "whole", "plain"))]
            cells.append(shown([ours / theirs for ours, theirs in zip(taken["save"], taken["plain"])], 2))
            print(f"| {' | '.join(cells)} |", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
