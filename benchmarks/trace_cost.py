"""Measure how much time log/losses.bin and --trace-every add to a step of mnist_ddp.

    OMP_NUM_THREADS=1 .venvs/mnist_ddp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/trace_cost.py [--rounds 100]

All variants run the app's training step in one job, in turns of fifty steps, with a log line's sync after every tenth
step. The first variant writes no losses. Its sync reduces two numbers: the last step's loss, and the summed loss since
the last log line. The other variants write the loss of every step to log/losses.bin. The last two variants also compute
digests of all weights and gradients on rank 0, at one of the fifty steps or at each step.

Times are medians, in milliseconds. Differences and ratios compare a variant with the first variant of the same round,
and have quartiles. The cost of the losses is smaller than this spread. The last line therefore has the mean time per
step of 1,000 writes of ten losses each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
from arguments import at_least  # noqa: E402
from data import Split  # noqa: E402
from model import build_model  # noqa: E402
from samestep.run import Run  # noqa: E402
from samestep.step_losses import StepLosses  # noqa: E402
from samestep.torch import DataLoader, GlobalBatchSampler, exact, reduction, updates  # noqa: E402
from samestep.trace import Trace  # noqa: E402
from step_cost import BATCH, describe_job, end, endless, rows, start  # noqa: E402
from train import build_optimizer, train_step  # noqa: E402

AT_ONCE = 50  # steps that are timed together
LOG_EVERY = 10


@dataclass(frozen=True)
class Variant:
    """The records that a run makes in addition to its log lines.

    Attributes:
        name: the text of the table's row.
        losses: whether the run writes the loss of each step.
        trace_every: value of --trace-every; 0 disables the digests.
    """

    name: str
    losses: bool = True
    trace_every: int = 0


VARIANTS = [
    Variant("no loss of single steps", losses=False),
    Variant("log/losses.bin"),
    Variant("log/losses.bin and --trace-every 50", trace_every=50),
    Variant("log/losses.bin and --trace-every 1", trace_every=1),
]


class Loop:
    """One variant's model, optimizer and batches."""

    def __init__(self, variant: Variant, run: Run, training: Split) -> None:
        self.variant = variant
        self.run = run
        self.metrics = run.metrics if variant.losses else None
        self.trace: Trace | None = None
        model = build_model("net", 0.5, torch.float32, 1)
        self.optimizer = build_optimizer(run.options, model)
        self.ddp = DistributedDataParallel(model)
        self.sampler = GlobalBatchSampler(len(training), BATCH, seed=run.options.seed)
        self.batches = endless(DataLoader(training, batch_sampler=self.sampler, seeded=False))
        exact(self.ddp, self.sampler, timer=run.timer)
        reduction.time_phases(model, self.optimizer, run.timer)
        if variant.trace_every and run.world.rank == 0:
            self.trace = Trace(variant.trace_every, run.step)
            updates.watch(dict(model.named_parameters()), self.trace)

    def fifty_steps(self) -> None:
        """Take fifty steps, with a log line's sync after each tenth step."""
        recorder = self.run.recorder
        recorder.metrics = self.metrics
        recorder.trace = self.trace
        if self.trace is not None:
            self.trace.count_step(self.run.step)
        for _ in range(AT_ONCE // LOG_EVERY):
            self.ten_steps()

    def ten_steps(self) -> None:
        """Take ten steps, and then a log line's sync."""
        running_loss = torch.zeros((), dtype=torch.float64)
        for _ in range(LOG_EVERY):
            images, labels = next(self.batches)
            loss = train_step(self.ddp, self.optimizer, self.sampler, images, labels)
            if self.variant.losses:
                self.run.after_step(loss)
            else:
                running_loss += loss
                self.run.after_step()
        if self.variant.losses:
            self.run.sync()
        else:
            self.run.sync(loss, running_loss)


def measure(loops: list[Loop], rounds: int) -> dict[str, list[float]]:
    """Return each loop's milliseconds per step in each round, by the name of the loop's variant."""
    taken: dict[str, list[float]] = {loop.variant.name: [] for loop in loops}
    for number in range(rounds + 1):  # the first round warms up
        first = number % len(loops)  # each round begins with the next loop
        for loop in loops[first:] + loops[:first]:
            begun = time.perf_counter()
            loop.fifty_steps()
            if number:
                taken[loop.variant.name].append(1000 * (time.perf_counter() - begun) / AT_ONCE)
    return taken


def loss_cost() -> float:
    """Return the mean time to write ten steps' losses, divided by ten, in milliseconds per step."""
    writes = 1_000
    with tempfile.TemporaryDirectory() as folder:
        losses = StepLosses(Path(folder), None)
        begun = time.perf_counter()
        for write in range(writes):
            losses.write((LOG_EVERY * write + step, 0.5) for step in range(1, LOG_EVERY + 1))
        return 1000 * (time.perf_counter() - begun) / writes / LOG_EVERY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=100, help="default: %(default)s")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun must start this (see --help)")
    console = os.fdopen(os.dup(1), "w")  # a Run redirects stdout to its log
    run, training = start(len(VARIANTS) * (arguments.rounds + 1) * AT_ONCE)
    taken = measure([Loop(variant, run, training) for variant in VARIANTS], arguments.rounds)
    if run.world.rank == 0:
        print(describe_job(run), file=console)
        print("\n".join(rows(taken)), file=console)
        print(f"\nlosses alone: {loss_cost():.4f} ms per step", file=console, flush=True)
    end(run)


if __name__ == "__main__":
    main()
