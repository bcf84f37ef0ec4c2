"""Measure the compute limit of cifar_ddp, in samples per second. torchrun starts this program."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def limit(options: argparse.Namespace) -> None:
    """Time training steps of the app on its first batches, which are cropped and flipped in advance."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    app = Path(__file__).resolve().parents[2] / "apps" / "cifar_ddp"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import load, make_loader
    from model import build_model
    from options import parse
    from samestep.torch import GlobalBatchSampler, exact
    from train import build_optimizer, train_step

    its = parse([f"--global-batch-size={options.batch}", "--dataset=cifar10", f"--data-dir={options.data}"])
    training, _ = load(its, torch.device("cpu"))
    sampler = GlobalBatchSampler(len(training), options.batch, rank=rank, world_size=world_size, seed=its.seed)
    shards = list(itertools.islice(make_loader(its, training, sampler), common.RESIDENT))
    model = build_model(its, torch.float32)
    optimizer = build_optimizer(its, model)
    ddp = DistributedDataParallel(model)
    exact(ddp, sampler)
    clock = common.Clock(options, rank)
    for images, labels in itertools.cycle(shards):
        train_step(its, ddp, optimizer, sampler, images, labels)
        if clock.step():
            break


def main() -> None:
    options = common.arguments()
    dist.init_process_group("gloo")
    limit(options)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
