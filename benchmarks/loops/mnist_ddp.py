"""PyTorch DDP: the loop of its tutorials and examples, and the compute limit. Started by torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from textbook_net import TextbookNet
from torch.nn.parallel import DistributedDataParallel


def textbook(options: argparse.Namespace) -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    dataset = common.textbook_images(options.data)
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch // dist.get_world_size(), sampler=sampler, num_workers=options.workers)
    model = DistributedDataParallel(TextbookNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    clock = common.Clock(options, dist.get_rank())
    model.train()
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if clock.step():
                return


def limit(options: argparse.Namespace, plain: bool) -> None:
    """The app's own model, optimizer and step, fed one resident batch; nothing is sampled, logged or saved.

    ``plain``: with contiguous tensors, all that the app has else; its DDP and SGD are the stock ones.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    app = Path(__file__).resolve().parents[2] / "apps" / "mnist_ddp"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from model import build_model
    from options import parse
    from samestep.sharding import Rows, shard
    from train import build_optimizer, train_step

    its = parse([])
    model = build_model(its.model, its.dropout, torch.float32, its.seed)
    first, last = shard(options.batch, rank, world_size)
    images, labels = torch.randn(last - first, 1, 28, 28), torch.randint(0, 10, (last - first,))
    if plain:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    optimizer = build_optimizer(its, model)
    ddp = DistributedDataParallel(model)
    clock = common.Clock(options, rank)
    while not clock.step():
        train_step(ddp, optimizer, images, labels, Rows(first, options.batch))


def main() -> None:
    options = common.arguments()
    dist.init_process_group("gloo")
    if options.kind == "textbook":
        textbook(options)
    else:
        limit(options, options.kind == "plain-limit")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
