"""Where Lightning's Trainer and samestep's Run meet: the hooks around each step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytorch_lightning as pl
import ranks
import torch
import weights
from data import Batch, Data
from samestep import FatalError
from samestep.run import Due, Run
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class RunCallback(pl.Callback):
    """Tells the Run what happened, and does what is due: a training loop, but for the step itself."""

    def __init__(self, run: Run, data: Data, device: torch.device) -> None:
        self.run, self.data = run, data
        self.due = Due(talk=False, log=False, test=False, save=False)
        self.loss_sum: Tensor = torch.zeros((), device=device)  # this rank's, of the last step
        self.sum_since = torch.zeros((), dtype=torch.float64, device=device)  # this rank's, since the last record
        self.sums = self.sum_since.new_zeros(2)  # of all ranks, when they last talked

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let Lightning count from the start of training, as after loading a checkpoint of its own."""
        fit, start = trainer.fit_loop, self.run.start
        current: Any = fit.epoch_progress.current
        current.processed = current.completed = start // self.data.batches.steps_per_epoch  # current_epoch
        fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = start  # global_step
        fit.epoch_loop.on_load_checkpoint({"_batches_that_stepped": start})  # the step of what it gives its loggers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.wish.listen()  # Lightning's handler of TERM would talk to the other ranks there and then
        ddp = trainer.strategy.model  # the module, wrapped
        assert isinstance(ddp, DistributedDataParallel)
        ranks.order_sums(ddp, self.run.phases, *self.data.training.batch(np.arange(1), self.data.dtype))  # ranks talk
        ranks.time_phases(ddp, trainer.optimizers[0], self.run.phases)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.run.phases.end("input")  # which Data.train_batch began

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.phases.end("waiting")  # backward() is a part of Lightning's optimizer step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # of training_step
        batch: Batch,
        batch_idx: int,
    ) -> None:
        self.loss_sum = outputs["loss_sum"]
        self.sum_since += self.loss_sum
        self.due = self.run.done(batch.step)
        if self.due.talk:
            says = [self.loss_sum, self.sum_since, *self.run.says()]
            self.sums = torch.tensor(says, dtype=torch.float64, device=self.loss_sum.device)
            ranks.add_up(self.sums)  # ranks talk
            self.due = self.run.heard(self.due, self.sums[2:].tolist())
        # By this Lightning now decides whether to validate; at the end of what it has of an epoch it does anyway.
        trainer.val_check_batch = 1 if self.due.test else math.inf
        if self.due.log and not self.due.test:
            self.record(trainer, pl_module, {})  # ranks talk

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Record the step after which Lightning has validated.

        Where --max-steps or a resume cuts an epoch, Lightning's ends too: it has validated for the result alone.
        """
        if self.due.test:
            self.record(trainer, pl_module, pl_module.tested)  # ranks talk

    def record(self, trainer: pl.Trainer, module: Any, tested: dict[str, Any]) -> None:
        """Record the last step, in Lightning's loggers too, and save a checkpoint where one is due."""
        self.sum_since.zero_()
        line = self.run.record(self.sums[0].item(), self.sums[1].item(), tested)
        self.log_line(trainer, line)
        if self.due.save:
            self.run.save(ranks, weights.groups(module.model, module.optimizer))  # ranks talk: they compare

    def log_line(self, trainer: pl.Trainer, line: dict[str, Any]) -> None:
        """Give Lightning's logger a line of metrics.jsonl. On rank 0, as it sees to itself."""
        values = {name: value for name, value in line.items() if name != "step"}
        try:
            for logger in trainer.loggers:
                logger.log_metrics(values, line["step"])
                if self.due.save:  # what comes later is done again by a job that starts from this checkpoint
                    logger.save()
        except OSError as problem:
            raise FatalError(f"cannot write Lightning's log: {problem.strerror}: {problem.filename}") from problem

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.wish.listen()  # where it validates without training

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.run.watchdog.beat()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave at once, with the exit codes of `log.run`: Lightning's orderly end may wait, and makes a Ctrl-C a 1."""
        raise exception
