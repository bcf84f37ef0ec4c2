"""The compute limit of mnist_ddp, and of mnist_lightning, which takes the same step. Started by torchrun."""

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
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def limit(options: argparse.Namespace, plain: bool) -> None:
    """The app's own model, optimizer and step, fed its own first batches, made before; nothing is sampled or logged.

    ``plain``: with contiguous tensors, and with DDP's own all-reduce.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    app = Path(__file__).resolve().parents[2] / "apps" / "mnist_ddp"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import load
    from model import build_model
    from options import parse
    from samestep import env
    from samestep.sharding import GlobalBatches
    from samestep.step_timer import StepTimer
    from samestep.torch.distributed import choose_device
    from samestep.torch.reduction import fix_reduction_order
    from train import build_optimizer

    its, device = parse([]), choose_device(options.device, env.detect())
    training, _ = load("mnist", options.data, device)
    batches = GlobalBatches(len(training.labels), options.batch, its.seed, rank, world_size)
    steps = range(common.RESIDENT)
    shards = [(*training.batch(batches.indices(step), torch.float32), batches.rows(step)) for step in steps]
    model = build_model(its.model, its.dropout, torch.float32, its.seed).to(device)
    if plain:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    optimizer = build_optimizer(its, model)
    ddp = DistributedDataParallel(model)
    if not plain:
        fix_reduction_order(ddp, StepTimer(), *training.batch(np.arange(1), torch.float32))
    clock = common.Clock(options, rank)
    for images, labels, rows in itertools.cycle(shards):
        optimizer.zero_grad()
        loss = F.nll_loss(ddp(images, rows), labels, reduction="sum")
        (loss * (world_size / rows.global_size)).backward()
        optimizer.step()
        if clock.step():
            break


def main() -> None:
    options = common.arguments()
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    limit(options, options.kind == "plain-limit")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
