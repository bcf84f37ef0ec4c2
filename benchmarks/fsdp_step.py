"""Compare the time of gpt_fsdp's training step with the time of a step of the same model in plain FSDP2 and in DDP.

    OMP_NUM_THREADS=1 .venvs/gpt_fsdp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/fsdp_step.py [--rounds 15] [--keep-memory]

The three variants take turns in one job, each on its own batches. Times are medians of the slowest rank, in
milliseconds. A ratio compares a variant with the app's step of the same round. ``--keep-memory`` keeps the C library's
memory settings, which distributed.release_memory_early otherwise changes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "gpt_fsdp")]
import distributed  # noqa: E402
import train  # noqa: E402
from arguments import at_least  # noqa: E402
from data import load  # noqa: E402
from model import GPT, build_model  # noqa: E402
from options import Options, parse  # noqa: E402
from samestep.step_timer import StepTimer  # noqa: E402
from samestep.torch import DataLoader, GlobalBatchSampler, exact  # noqa: E402

CPU = torch.device("cpu")


def app(options: Options) -> Callable[[int], object]:
    """Return a function that runs a training step of the app."""
    mesh = distributed.make_mesh(options, CPU)
    model = build_model(options, torch.float32, mesh)
    optimizer = train.build_optimizer(options, model)
    timer = StepTimer()
    distributed.time_phases(model, optimizer, timer)
    training, _ = load(options, CPU)
    size = options.global_batch_size
    group = mesh["dp"]
    sampler = GlobalBatchSampler(len(training), size, seed=1, accumulate=options.accumulate, group=group)
    exact(model, sampler)
    loader = DataLoader(training, batch_sampler=sampler, seeded=False)
    batches = iter(loader)

    def take(step: int) -> float:
        return train.train_step(options, model, optimizer, sampler, next(batches), mesh, timer).item()

    return take


def plain(options: Options, wrap: Callable[[GPT], nn.Module]) -> Callable[[int], object]:
    """Return a function that runs a step as in tutorials, with random windows, mean losses, and torch's clipping."""
    torch.manual_seed(1)
    model = GPT(options.layers, options.width, options.heads)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)
    training, _ = load(options, CPU)
    count = options.global_batch_size // dist.get_world_size()

    def take(step: int) -> float:
        tokens, targets = training.batch(np.random.default_rng(step).integers(0, len(training), count))
        loss = F.cross_entropy(wrapped(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), options.clip_norm or float("inf"))
        optimizer.step()
        return loss.item()

    return take


def shard(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=15, help="default: %(default)s")
    parser.add_argument("--keep-memory", action="store_true", help="free memory stays with the process")
    parser.add_argument("options", nargs="*", help="of the app, after --")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as above")
    if not given.keep_memory:
        distributed.release_memory_early()
    dist.init_process_group("gloo")
    default = ["--layers=6", "--width=256", "--heads=8", "--context=128", "--global-batch-size=16", "--clip-norm=1"]
    options = parse([*default, *given.options])
    variants = {
        "the app": app(options),
        "plain FSDP2": plain(options, shard),
        "DDP": plain(options, DistributedDataParallel),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(given.rounds + 2):
        for name in [*variants] if step % 2 else reversed(variants):
            dist.barrier()
            begun = time.perf_counter()
            variants[name](step)
            took = torch.tensor([time.perf_counter() - begun])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if step >= 2:  # the first two rounds allocate buffers
                seconds[name].append(took.item())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {given.rounds} rounds")
        for name, each in seconds.items():
            ratios = sorted(one / its for one, its in zip(each, seconds["the app"]))
            middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
            print(f"{name:12} {1000 * statistics.median(each):7.1f} ms  {statistics.median(ratios):.3f} ({middle})")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
