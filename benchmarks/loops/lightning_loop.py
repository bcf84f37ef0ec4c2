"""Measure samples per second of a program from PyTorch Lightning's documentation. torchrun starts this program."""

from __future__ import annotations

import argparse
import os
from typing import Any

import common

common.torchvision_that_imports()  # Lightning imports torchvision if it is installed
import pytorch_lightning as pl  # noqa: E402
import torch  # noqa: E402
from textbook_task import TASKS, Task  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


class TextbookModule(pl.LightningModule):
    def __init__(self, task: Task, clock: common.Clock) -> None:
        super().__init__()
        self.task = task
        self.model = task.model()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.task.loss(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.clock.step():
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.optimizer(self.parameters())


def textbook(options: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    task = TASKS[options.task]
    dataset = task.images(options.data)
    # Lightning adds its DistributedSampler to this loader.
    loader = DataLoader(dataset, options.batch // world_size, shuffle=True, num_workers=options.workers)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_steps=options.warm_up + options.steps,
        default_root_dir=str(options.out.parent),
        # No timed loop saves checkpoints. A progress bar would slow this loop down.
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TextbookModule(task, common.Clock(options, rank)), loader)


if __name__ == "__main__":
    textbook(common.arguments())
    os._exit(0)  # gloo's threads may abort a normal exit
