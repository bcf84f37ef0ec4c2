"""Measure the compute limit of mnist_ddp and mnist_lightning, which have the same training step.

torchrun starts this program.
"""

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


def limit(options: argparse.Namespace, plain: bool) -> None:
    """Time training steps of the app on its first batches in memory, without sampling or logs.

    Args:
        options: options that throughput.py passes, such as the batch size.
        plain: whether to use contiguous tensors and DDP's own all-reduce.
    """
    app = Path(__file__).resolve().parents[2] / "apps" / "mnist_ddp"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import load
    from model import build_model
    from options import parse
    from samestep import env
    from samestep.torch import DataLoader, GlobalBatchSampler, exact
    from samestep.torch.distributed import choose_device
    from train import build_optimizer, train_step

    its = parse([])
    device = choose_device(options.device, env.detect())
    training, _ = load("mnist", options.data, device, torch.float32)
    sampler = GlobalBatchSampler(len(training), options.batch, seed=its.seed, drop_last=True)
    loader = DataLoader(training, batch_sampler=sampler, seeded=False)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    shards = list(itertools.islice(epochs, common.RESIDENT))
    model = build_model(its.model, its.dropout, torch.float32, its.seed).to(device)
    if plain:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    optimizer = build_optimizer(its, model)
    ddp = DistributedDataParallel(model)
    if not plain:
        exact(ddp, sampler)
    clock = common.Clock(options, dist.get_rank())
    for images, labels in itertools.cycle(shards):
        train_step(ddp, optimizer, sampler, images, labels)
        if clock.step():
            break


def main() -> None:
    options = common.arguments()
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    limit(options, options.kind == "plain-limit")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
