"""Measure samples per second of Horovod's PyTorch MNIST example, or a compute limit of mnist_horovod.

horovodrun starts this program.
"""

from __future__ import annotations

import argparse
import itertools
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
    """Time training steps of the app on its first batches in memory, without sampling or logs.

    The kind "fused-limit" uses hvd.DistributedOptimizer. Horovod then reduces several ready gradients at once (tensor
    fusion), while the rank computes the other gradients.
    """
    app = Path(__file__).resolve().parents[2] / "apps" / "mnist_horovod"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import load
    from model import build_model
    from options import parse
    from samestep.torch import DataLoader, GlobalBatchSampler, exact
    from train import build_optimizer, train_step

    its = parse([])
    its.gradients = "optimizer" if options.kind == "fused-limit" else "group"
    training, _ = load("mnist", options.data, torch.device("cpu"), torch.float32)
    sampler = GlobalBatchSampler(len(training), options.batch, hvd.rank(), hvd.size(), its.seed, drop_last=True)
    loader = DataLoader(training, batch_sampler=sampler, seeded=False)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    shards = list(itertools.islice(epochs, common.RESIDENT))
    model = build_model(its.model, its.dropout, torch.float32, its.seed)
    exact(model, sampler)
    optimizer = build_optimizer(its, model)
    if options.kind == "fused-limit":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    clock = common.Clock(options, hvd.rank())
    for images, labels in itertools.cycle(shards):
        train_step(its, model, optimizer, sampler, images, labels)
        if clock.step():
            break


def main() -> None:
    options = common.arguments()
    if options.kind == "limit":
        os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "1"  # as in the app
    hvd.init()
    if options.kind == "textbook":
        textbook(options)
    else:
        limit(options)
    hvd.shutdown()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
