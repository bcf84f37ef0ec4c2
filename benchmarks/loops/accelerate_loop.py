"""Measure samples per second of the loop in Hugging Face Accelerate's quick tour. torchrun starts this program."""

from __future__ import annotations

import os

import common
from accelerate import Accelerator
from textbook_task import TASKS
from torch.utils.data import DataLoader


def main() -> None:
    options = common.arguments()
    task = TASKS[options.task]
    accelerator = Accelerator(cpu=True)
    # Accelerate shards this loader over the ranks, so the loader's batch size is a rank's batch size.
    size = options.batch // accelerator.num_processes
    loader = DataLoader(task.images(options.data), size, shuffle=True, num_workers=options.workers)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    clock = common.Clock(options, accelerator.process_index)
    model.train()
    while not clock.over:
        for data, target in loader:
            optimizer.zero_grad()
            loss = task.loss(model(data), target)
            accelerator.backward(loss)
            optimizer.step()
            if clock.step():
                break
    accelerator.wait_for_everyone()  # an early exit of one rank would cause errors on the ranks that still communicate


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may abort a normal exit
