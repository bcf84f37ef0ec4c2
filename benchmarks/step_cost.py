"""Measure what a step of mnist_ddp pays for the kit, stop requests, phases that find a straggler, and virtual ranks.

    OMP_NUM_THREADS=1 .venvs/mnist_ddp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/step_cost.py [--rounds 200] [--virtual-ranks 4 8]

The first variant is a loop without the kit: indices of a permutation, torch's own dropout and reduction, and the mean
over a rank's shard. All others take the app's step. A `Run` handles the stop requests, or the kit's
`samestep.torch.StopRequests`.

All variants take turns in one job, ten steps each, with the log line's sum over ranks after the tenth; nothing is kept.
Times are medians, in milliseconds; differences from the first and ratios are of each round, with their quartiles.
Lightning's variant has what PyTorch Lightning 2.6 adds to each step for the same purpose: a broadcast of rank 0's flag.

With --virtual-ranks, the first two variants are without it, at one thread and at this job's share of the processors.
The others are each V at one thread, with the number of gradients that a rank has left to exchange, and the kB that it
sends per step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
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

AT_ONCE = 10  # steps that are timed together, and between two log lines
BATCH = 128  # images over all ranks


def endless(loader: DataLoader) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    while True:
        yield from loader


def plain_batches(dataset: Split, batch: int, rank: int, world_size: int) -> Iterator[Any]:
    """Yield a rank's shards of shuffled batches without end, as a loop without the kit would."""
    while True:
        order = torch.randperm(len(dataset)).numpy()
        for begin in range(0, len(dataset) - batch + 1, batch):
            yield dataset.batch(order[begin + rank : begin + batch : world_size])


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, sampler: GlobalBatchSampler, images: Tensor, labels: Tensor
) -> Tensor:
    """Take the step of a loop without the kit."""
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:  # noqa: C901
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--virtual-ranks", type=int, nargs="+", metavar="V", help="measure these instead")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if "RANK" not in os.environ:
        parser.error("torchrun must start this (see --help)")
    device, world = torch.device("cpu"), env.detect(os.environ)
    console = os.fdopen(os.dup(1), "w")  # a Run gives stdout to its log
    distributed.rendezvous(world, device, 300)
    steps = 4 * (rounds + 1) * AT_ONCE
    options = parse(["--dataset=mnist-5k", f"--epochs={steps}", f"--global-batch-size={BATCH}", "--quiet"])
    if world.rank == 0:
        options.run_dir = Path(tempfile.mkdtemp(prefix="step-cost-"))
    run = Run("mnist_ddp", options, world, Watchdog(), datasets.resolve)
    run.restore(distributed, Parts(load=lambda groups: None, groups=dict))
    training, test = load(options.dataset, options.data_dir, device, torch.float32)
    global_batches = GlobalBatches(len(training), BATCH, options.seed, world.rank, world.world_size)
    run.start(global_batches, len(test), "net", "cpu", {})

    def variant(
        kit: bool = True,
        stops: bool = False,
        phases: bool = False,
        lightning: bool = False,
        kit_stops: bool = False,
        virtual_ranks: int | None = None,
        threads: int | None = None,
    ) -> Callable[[], None]:
        """Return a function that takes ten steps, and sums the losses over ranks after the tenth."""
        model = build_model("net", 0.5, torch.float32, 1)
        optimizer = build_optimizer(options, model)
        sampler = GlobalBatchSampler(len(training), BATCH, seed=options.seed, virtual_ranks=virtual_ranks)
        batches = endless(DataLoader(training, batch_sampler=sampler, seeded=False))
        ddp = DistributedDataParallel(model)
        update = train_step
        if kit:
            exact(ddp, sampler, timer=run.timer if phases else None)
        else:
            batches = plain_batches(training, BATCH, world.rank, world.world_size)
            update = plain_step
        if virtual_ranks:
            update = VirtualRanks(ddp, sampler).train_step
        if phases:
            reduction.time_phases(model, optimizer, run.timer)
        requests = StopRequests() if kit_stops else None

        def ten_steps() -> None:
            distributed.set_threads(threads)
            running_loss = torch.zeros((), dtype=torch.float64)
            for _ in range(AT_ONCE):
                if lightning:
                    flag = torch.tensor([0])
                    dist.broadcast(flag, src=0)
                    flag.item()
                with run.timer.phase("input") if phases else nullcontext():
                    images, labels = next(batches)
                loss = update(ddp, optimizer, sampler, images, labels)
                running_loss += loss
                if stops:
                    run.after_step(loss)
                if requests:
                    requests.step()
            if stops:
                run.sync()
            else:
                dist.all_reduce(running_loss)

        return ten_steps

    def cost(virtual_ranks: int) -> str:
        """Describe a variant by the data that a rank exchanges."""
        nodes = max(map(len, nodes_of_ranks(virtual_ranks, world.world_size)))
        size = 4 * sum(parameter.numel() for parameter in build_model("net", 0.5, torch.float32, 1).parameters())
        sent = nodes * size * (world.world_size - 1)
        return f"virtual ranks {virtual_ranks}, 1 thread ({nodes} to exchange, {sent / 1000:.0f} kB)"

    share = max(1, len(os.sched_getaffinity(0)) // world.world_size)
    loops = (
        {
            "no virtual ranks, 1 thread": variant(threads=1),
            f"no virtual ranks, {share} threads": variant(threads=share),
            **{cost(each): variant(virtual_ranks=each, threads=1) for each in arguments.virtual_ranks},
        }
        if arguments.virtual_ranks
        else {
            "a loop without the kit": variant(kit=False),
            "the kit alone": variant(),
            "stop requests": variant(stops=True),
            "stop requests and phases (the app)": variant(stops=True, phases=True),
            "the kit, and Lightning's broadcast": variant(lightning=True),
            "stop requests, by the kit": variant(kit_stops=True),
        }
    )
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for each in range(rounds + 1):  # the first warms up
        first = each % len(loops)  # who comes first changes
        for name in [*loops][first:] + [*loops][:first]:
            begun = time.perf_counter()
            loops[name]()
            if each:
                taken[name].append(1000 * (time.perf_counter() - begun) / AT_ONCE)
    if world.rank == 0:
        say = partial(print, file=console, flush=True)
        say(f"{world.world_size} ranks, {torch.get_num_threads()} threads each, torch {torch.__version__}\n")
        say("| a step with | ms | ms more | ratio |\n|---|---|---|---|")
        reference = next(iter(taken.values()))
        for name, times in taken.items():
            low, median, high = statistics.quantiles([a / b for a, b in zip(times, reference)], n=4)
            more = statistics.quantiles([a - b for a, b in zip(times, reference)], n=4)
            difference = f"{more[1]:.2f} ({more[0]:.2f} to {more[2]:.2f})"
            ratio = f"{median:.3f} ({low:.3f} to {high:.3f})"
            say(f"| {name} | {statistics.median(times):.2f} | {difference} | {ratio} |")
    run.monitor.stop()
    dist.barrier()  # no rank leaves a heartbeat any more
    if world.rank == 0:
        shutil.rmtree(options.run_dir, ignore_errors=True)
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
