"""Horovod: the loop of its PyTorch MNIST example, and the compute limit. Started by horovodrun."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import common
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from textbook_net import TextbookNet


def textbook(options: argparse.Namespace) -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    dataset = common.textbook_images(options.data)
    sampler: DistributedSampler[object] = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, options.batch // hvd.size(), sampler=sampler, num_workers=options.workers)
    model = TextbookNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    clock = common.Clock(options, hvd.rank())
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


def limit(options: argparse.Namespace) -> None:
    """The app's own model, optimizer and step, fed one resident batch; nothing is sampled, logged or saved.

    Tensor fusion is on, Horovod's default. The app turns it off, so the distance also shows what equal bits cost.
    """
    rank, world_size = hvd.rank(), hvd.size()
    app = Path(__file__).resolve().parents[2] / "apps" / "mnist_horovod"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from model import build_model
    from options import parse
    from samestep.sharding import Rows, shard
    from train import build_optimizer, train_step

    its = parse([])
    model = build_model(its.model, its.dropout, torch.float32, its.seed)
    optimizer = hvd.DistributedOptimizer(build_optimizer(its, model), model.named_parameters(), op=hvd.Sum)
    first, last = shard(options.batch, rank, world_size)
    images, labels = torch.randn(last - first, 1, 28, 28), torch.randint(0, 10, (last - first,))
    clock = common.Clock(options, rank)
    while not clock.step():
        train_step(model, optimizer, images, labels, Rows(first, options.batch))


def main() -> None:
    options = common.arguments()
    hvd.init()
    if options.kind == "textbook":
        textbook(options)
    else:
        limit(options)
    hvd.shutdown()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
