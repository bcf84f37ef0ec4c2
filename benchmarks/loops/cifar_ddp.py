"""The compute limit of cifar_ddp. Started by torchrun."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

import common
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def limit(options: argparse.Namespace) -> None:
    """The app's own model, optimizer and step, fed its own first batches, cropped and flipped before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    app = Path(__file__).resolve().parents[2] / "apps" / "cifar_ddp"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import batches_of, load
    from model import build_model
    from options import parse
    from samestep.sharding import GlobalBatches
    from samestep.step_timer import StepTimer
    from samestep.torch.reduction import fix_reduction_order
    from train import build_optimizer, train_step

    its = parse([f"--global-batch-size={options.batch}"])
    training, _ = load("cifar10", options.data, torch.device("cpu"))
    batches = GlobalBatches(len(training.labels), options.batch, its.seed, rank, world_size)
    shards = itertools.cycle(list(batches_of(its, training, batches, range(common.RESIDENT), torch.float32)))
    model = build_model(its, torch.float32)
    optimizer = build_optimizer(its, model)
    ddp = DistributedDataParallel(model)
    ddp.broadcast_buffers = False
    clock, timer = common.Clock(options, rank), StepTimer()
    fix_reduction_order(ddp, timer, *training.batch(np.arange(1), torch.float32))
    for step in itertools.count():
        train_step(its, ddp, optimizer, shards, batches, step, timer)
        if clock.step():
            break


def main() -> None:
    options = common.arguments()
    dist.init_process_group("gloo")
    limit(options)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
