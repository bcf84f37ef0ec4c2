"""What it costs mnist_ddp to know where each step's seconds go.

    OMP_NUM_THREADS=1 .venvs/mnist_ddp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/phases.py [--rounds 300] [--quick]

Two copies of the app's model train side by side in one job, on one resident batch of 128 images over all ranks: one as
the app does, with hooks, marks and four numbers of each rank in the sum of every log line, one without. In each round
either does 10 steps and the sum, and who is first changes. Times are of rank 0's processor, in which other work on the
machine hardly counts; the ratio is each round's: its median, and the middle half of all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
from model import build_model  # noqa: E402
from ranks import time_phases  # noqa: E402
from samestep.phases import PHASES, Phases  # noqa: E402
from samestep.sharding import Rows, shard  # noqa: E402
from train import train_step  # noqa: E402

BATCH, STEPS = 128, 10  # images over all ranks; steps between two log lines


def loop(phases: Phases | None) -> Callable[[], None]:
    """Steps and a log line's sum, timed in phases or not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, last = shard(BATCH, rank, world_size)
    images, labels, rows = (
        torch.randn(last - first, 1, 28, 28),
        torch.randint(0, 10, (last - first,)),
        Rows(first, BATCH),
    )
    model = build_model("net", 0.5, torch.float32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    ddp = DistributedDataParallel(model)
    if phases:
        time_phases(model, optimizer, phases)

    def log_line() -> None:
        for _ in range(STEPS):
            if phases:
                phases.begin()
                phases.end("input")
            train_step(ddp, optimizer, images, labels, rows)
        says = [0.0] * 4
        if phases:
            others = [0.0] * len(PHASES)
            says += [*others * rank, *phases.take(), *others * (world_size - rank - 1)]
        dist.all_reduce(torch.tensor(says, dtype=torch.float64))

    return log_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun must start this (see --help)")
    dist.init_process_group("gloo")
    loops = {"timed": loop(Phases()), "bare": loop(None)}
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(2 if options.quick else options.rounds):
        for name in sorted(loops, reverse=bool(round_ % 2)):
            dist.barrier()
            begun = time.process_time()
            loops[name]()
            taken[name].append(1000 * (time.process_time() - begun) / STEPS)
    if dist.get_rank() == 0:
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(taken["timed"], taken["bare"])], n=4)
        bare = statistics.median(taken["bare"])
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}: a step takes {bare:.2f} ms of a processor")
        print(f"with its phases timed, times as long: {ratio:.4f} ({low:.4f} to {high:.4f})")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
