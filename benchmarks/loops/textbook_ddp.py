"""Measure samples per second of the loop in PyTorch's tutorials on DDP. torchrun starts this program."""

from __future__ import annotations

import argparse
import os
import sys

import common
import torch.distributed as dist
from textbook_task import TASKS
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def textbook(options: argparse.Namespace) -> None:
    task = TASKS[options.task]
    dataset = task.images(options.data)
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch // dist.get_world_size(), sampler=sampler, num_workers=options.workers)
    model = DistributedDataParallel(task.model().to(options.device))
    optimizer = task.optimizer(model.parameters())
    clock = common.Clock(options, dist.get_rank())
    model.train()
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = task.loss(model(data.to(options.device)), target.to(options.device))
            loss.backward()
            optimizer.step()
            if clock.step():
                return


def main() -> None:
    options = common.arguments()
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    textbook(options)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
