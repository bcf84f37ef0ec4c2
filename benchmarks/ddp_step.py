"""What makes mnist_ddp's training step faster on CPU, and what does not.

    OMP_NUM_THREADS=1 .venvs/mnist_ddp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/ddp_step.py [--rounds 25] [--compile]

All variants take turns in one job, on one resident batch of 128 images over all ranks. Times are medians, in
milliseconds; ratios to the plain step (contiguous tensors, stock DDP and SGD) are of each round. ``--compile`` adds
torch.compile, which needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
from model import build_model  # noqa: E402
from samestep.sharding import Rows, shard  # noqa: E402
from train import train_step  # noqa: E402

BATCH, AT_ONCE = 128, 4  # images over all ranks; steps that are timed together
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


def variant(
    images: Tensor,
    labels: Tensor,
    rows: Rows,
    weights: torch.memory_format | None = None,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    inner: Callable[[nn.Module], nn.Module] = lambda model: model,
    **sgd: Any,
) -> Callable[[], object]:
    """A training step. ``weights`` gives all convolutions' weights one format; None leaves what the app does."""
    model = build_model("net", 0.5, torch.float32, 1)
    if weights is not None:
        nn.utils.convert_conv2d_weight_memory_format(model, weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, **sgd)
    wrapped = wrap(inner(model))
    return lambda: train_step(wrapped, optimizer, images, labels, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="also by torch.compile")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun must start this (see --help)")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, last = shard(BATCH, rank, world_size)
    data = torch.randn(last - first, 1, 28, 28), torch.randint(0, 10, (last - first,)), Rows(first, BATCH)
    ddp = DistributedDataParallel
    steps = {
        "plain": variant(*data, CONTIGUOUS),
        "channels last in the first convolution (the app)": variant(*data),
        "in all convolutions": variant(*data, CHANNELS_LAST),
        "the app, fused SGD": variant(*data, fused=True),
        "the app, foreach SGD": variant(*data, foreach=True),
        "the app, gradient_as_bucket_view": variant(*data, wrap=lambda m: ddp(m, gradient_as_bucket_view=True)),
        "the app, static_graph": variant(*data, wrap=lambda m: ddp(m, static_graph=True)),
        "the app, without DDP": variant(*data, wrap=lambda model: model),
    }
    if options.compile:
        compiled: Callable[[nn.Module], Any] = torch.compile
        steps["the app, torch.compile"] = variant(*data, inner=compiled)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            step()
            begun = time.perf_counter()
            for _ in range(AT_ONCE):
                step()
            taken[name].append(1000 * (time.perf_counter() - begun) / AT_ONCE)
    if rank == 0:
        print(f"{world_size} ranks, {torch.get_num_threads()} threads each, torch {torch.__version__}\n")
        print("| step | ms | times as fast as plain |\n|---|---|---|")
        for name, times in taken.items():
            ratio = statistics.median(plain / this for plain, this in zip(taken["plain"], times))
            print(f"| {name} | {statistics.median(times):.1f} (from {min(times):.1f}) | {ratio:.2f} |")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
