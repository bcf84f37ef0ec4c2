"""Run mnist_lightning's program with a callback that writes Lightning's counts of epochs and steps to $PROBE."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

APP = Path(__file__).resolve().parents[2] / "apps" / "mnist_lightning"
sys.path.insert(0, str(APP))

import pytorch_lightning as pl  # noqa: E402
import train  # type: ignore[import-not-found]  # noqa: E402
from samestep import log  # noqa: E402


class Probe(pl.Callback):
    def __init__(self) -> None:
        self.file = Path(os.environ["PROBE"]).open("a", buffering=1)

    def write(self, **values: Any) -> None:
        self.file.write(json.dumps(values) + "\n")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.write(epoch=trainer.current_epoch, global_step=trainer.global_step, step=pl_module.sampler.step - 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.write(validated=trainer.global_step)


def build_trainer(*arguments: Any) -> pl.Trainer:
    trainer: pl.Trainer = build(*arguments)
    trainer.callbacks.append(Probe())  # type: ignore[attr-defined]
    return trainer


build = train.build_trainer
train.build_trainer = build_trainer
log.run(train.main)
