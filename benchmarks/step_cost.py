"""Measure how much time the kit, stop requests, phase times and virtual ranks add to a step of mnist_ddp.

    OMP_NUM_THREADS=1 .venvs/mnist_ddp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/step_cost.py [--rounds 200] [--virtual-ranks 4 8]

The first variant is a loop without the kit: indices of a permutation, torch's own dropout and reduction, and the mean
over a rank's shard. All other variants run the app's training step. In variants with stop requests, either a `Run` or
the kit's `samestep.torch.StopRequests` handles these requests.

All variants take turns in one job, ten steps each, with the log line's all-reduce after the tenth step. Times are
medians, in milliseconds. Differences and ratios have quartiles, and compare two variants in the same round. The kit
alone is compared with the loop without the kit, and each other variant with the kit alone. The variant with Lightning's
broadcast sends rank 0's flag to all ranks in each step. PyTorch Lightning 2.6 does the same to handle stop requests.

With --virtual-ranks, the first two variants have no virtual ranks, and use one thread or a rank's share of the
processors. Each other variant has V virtual ranks and one thread. The variant's row shows the number of partial sums
that a rank exchanges, and the kB that a rank sends per step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
from arguments import at_least  # noqa: E402
from data import Split, load  # noqa: E402
from model import build_model  # noqa: E402
from options import parse  # noqa: E402
from samestep import env  # noqa: E402
from samestep.data import datasets  # noqa: E402
from samestep.recovery.watchdog import Watchdog  # noqa: E402
from samestep.run import Parts, Run  # noqa: E402
from samestep.sharding import GlobalBatches  # noqa: E402
from samestep.torch import DataLoader, GlobalBatchSampler, StopRequests, distributed, exact, reduction  # noqa: E402
from samestep.virtual_ranks import nodes_of_ranks  # noqa: E402
from train import build_optimizer, train_step  # noqa: E402
from virtual_ranks import VirtualRanks  # noqa: E402

AT_ONCE = 10  # steps that are timed together, and steps between two log lines
BATCH = 128  # images over all ranks


def endless(loader: DataLoader) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    while True:
        yield from loader


def plain_batches(dataset: Split, batch: int, rank: int, world_size: int) -> Iterator[Any]:
    """Yield a rank's shards of shuffled batches endlessly, as a loop without the kit would.

    Args:
        dataset: the training set.
        batch: number of samples in a global batch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
    """
    while True:
        order = torch.randperm(len(dataset)).numpy()
        for begin in range(0, len(dataset) - batch + 1, batch):
            yield dataset.batch(order[begin + rank : begin + batch : world_size])


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, sampler: GlobalBatchSampler, images: Tensor, labels: Tensor
) -> Tensor:
    """Take a step without the kit, and return this rank's loss."""
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True)
class Variant:
    """The parts of a step in addition to training.

    Attributes:
        name: the text of the table's row.
        kit: whether the step uses the kit's batches, dropout and gradients.
        stops: whether a `Run` counts the step and handles stop requests.
        phases: whether the phases of a step are timed.
        lightning: whether rank 0's flag is broadcast, as PyTorch Lightning does.
        kit_stops: whether the kit's `StopRequests` handles stop requests.
        virtual_ranks: number V of virtual ranks; None for no virtual ranks.
        threads: number of threads per rank; None for torch's default.
    """

    name: str
    kit: bool = True
    stops: bool = False
    phases: bool = False
    lightning: bool = False
    kit_stops: bool = False
    virtual_ranks: int | None = None
    threads: int | None = None


VARIANTS = [
    Variant("a loop without the kit", kit=False),
    Variant("the kit alone"),
    Variant("stop requests", stops=True),
    Variant("stop requests and phases (the app)", stops=True, phases=True),
    Variant("the kit, and Lightning's broadcast", lightning=True),
    Variant("stop requests, by the kit", kit_stops=True),
]
REFERENCES = {variant.name: VARIANTS[1].name for variant in VARIANTS[2:]}  # for `rows`


class Loop:
    """One variant's model, optimizer and batches."""

    def __init__(self, variant: Variant, run: Run, training: Split) -> None:
        self.variant = variant
        self.run = run
        self.update = train_step
        self.requests = StopRequests() if variant.kit_stops else None
        model = build_model("net", 0.5, torch.float32, 1)
        self.optimizer = build_optimizer(run.options, model)
        self.ddp = DistributedDataParallel(model)
        self.sampler = GlobalBatchSampler(
            len(training), BATCH, seed=run.options.seed, virtual_ranks=variant.virtual_ranks
        )
        if variant.kit:
            self.batches = endless(DataLoader(training, batch_sampler=self.sampler, seeded=False))
            exact(self.ddp, self.sampler, timer=run.timer if variant.phases else None)
        else:
            self.batches = plain_batches(training, BATCH, run.world.rank, run.world.world_size)
            self.update = plain_step
        if variant.virtual_ranks:
            self.update = VirtualRanks(self.ddp, self.sampler).train_step
        if variant.phases:
            reduction.time_phases(model, self.optimizer, run.timer)

    def ten_steps(self) -> None:
        """Take ten steps, and sum the losses over ranks after the tenth step."""
        distributed.set_threads(self.variant.threads)
        running_loss = torch.zeros((), dtype=torch.float64)
        for _ in range(AT_ONCE):
            running_loss += self.step()
        if self.variant.stops:
            self.run.sync()
        else:
            dist.all_reduce(running_loss)

    def step(self) -> Tensor:
        """Take one step, and return its loss."""
        if self.variant.lightning:
            flag = torch.tensor([0])
            dist.broadcast(flag, src=0)
            flag.item()
        with self.run.timer.phase("input") if self.variant.phases else nullcontext():
            images, labels = next(self.batches)
        loss = self.update(self.ddp, self.optimizer, self.sampler, images, labels)
        if self.variant.stops:
            self.run.after_step(loss)
        if self.requests:
            self.requests.step()
        return loss


def variants_of(virtual_ranks: list[int], world_size: int) -> list[Variant]:
    """Return the variants of --virtual-ranks. Their names include the amount of data that a rank sends."""
    share = max(1, len(os.sched_getaffinity(0)) // world_size)
    variants = [
        Variant("no virtual ranks, 1 thread", threads=1),
        Variant(f"no virtual ranks, {share} threads", threads=share),
    ]
    size = 4 * sum(parameter.numel() for parameter in build_model("net", 0.5, torch.float32, 1).parameters())
    for each in virtual_ranks:
        nodes = max(map(len, nodes_of_ranks(each, world_size)))
        sent = nodes * size * (world_size - 1)
        name = f"virtual ranks {each}, 1 thread ({nodes} to exchange, {sent / 1000:.0f} kB)"
        variants.append(Variant(name, virtual_ranks=each, threads=1))
    return variants


def measure(loops: list[Loop], rounds: int) -> dict[str, list[float]]:
    """Return each loop's milliseconds per step in each round, by the name of the loop's variant."""
    taken: dict[str, list[float]] = {loop.variant.name: [] for loop in loops}
    for number in range(rounds + 1):  # the first round warms up
        first = number % len(loops)  # each round begins with the next loop
        for loop in loops[first:] + loops[:first]:
            begun = time.perf_counter()
            loop.ten_steps()
            if number:
                taken[loop.variant.name].append(1000 * (time.perf_counter() - begun) / AT_ONCE)
    return taken


def rows(taken: Mapping[str, list[float]], references: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the lines of a Markdown table of the milliseconds that `measure` returns.

    Args:
        taken: the milliseconds, by the name of the variant.
        references: name of the variant with which another variant is compared; the first variant if it is missing.
    """
    yield "| a step with | ms | ms more | ratio | compared with |\n|---|---|---|---|---|"
    first = next(iter(taken))
    for name, times in taken.items():
        reference = (references or {}).get(name, first)
        pairs = [*zip(times, taken[reference])]
        low, median, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        more = statistics.quantiles([a - b for a, b in pairs], n=4)
        difference = f"{more[1]:.2f} ({more[0]:.2f} to {more[2]:.2f})"
        ratio = f"{median:.3f} ({low:.3f} to {high:.3f})"
        yield f"| {name} | {statistics.median(times):.2f} | {difference} | {ratio} | {reference} |"


def start(steps: int) -> tuple[Run, Split]:
    """Join the other ranks, and return a run of mnist_ddp in a temporary folder and its training set.

    Args:
        steps: number of steps that the run must at least allow.
    """
    device = torch.device("cpu")
    world = env.detect(os.environ)
    distributed.rendezvous(world, device, 300)
    options = parse(["--dataset=mnist-5k", f"--epochs={steps}", f"--global-batch-size={BATCH}", "--quiet"])
    if world.rank == 0:
        options.run_dir = Path(tempfile.mkdtemp(prefix="step-cost-"))
    run = Run("mnist_ddp", options, world, Watchdog(), datasets.resolve)
    run.restore(distributed, Parts(load=lambda groups: None, groups=dict))
    training, test = load(options.dataset, options.data_dir, device, torch.float32)
    global_batches = GlobalBatches(len(training), BATCH, options.seed, world.rank, world.world_size)
    run.start(global_batches, len(test), "net", "cpu", {})
    return run, training


def end(run: Run) -> NoReturn:
    """Delete the run's folder, and end this process."""
    run.monitor.stop()
    dist.barrier()  # after the barrier, no rank writes heartbeats
    if run.world.rank == 0:
        shutil.rmtree(run.options.run_dir, ignore_errors=True)
    os._exit(0)  # gloo's threads may abort a normal exit


def describe_job(run: Run) -> str:
    """Return the line above the table, with the ranks, the threads and torch's version."""
    return f"{run.world.world_size} ranks, {torch.get_num_threads()} threads each, torch {torch.__version__}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=200, help="default: %(default)s")
    parser.add_argument("--virtual-ranks", type=at_least(1), nargs="+", metavar="V", help="measure these instead")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun must start this (see --help)")
    console = os.fdopen(os.dup(1), "w")  # a Run redirects stdout to its log
    run, training = start(4 * (arguments.rounds + 1) * AT_ONCE)
    variants = VARIANTS
    if arguments.virtual_ranks:
        variants = variants_of(arguments.virtual_ranks, run.world.world_size)
    taken = measure([Loop(variant, run, training) for variant in variants], arguments.rounds)
    if run.world.rank == 0:
        print(describe_job(run), file=console)
        print("\n".join(rows(taken, REFERENCES)), file=console, flush=True)
    end(run)


if __name__ == "__main__":
    main()
