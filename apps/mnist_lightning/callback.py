"""Connect Lightning's Trainer to samestep's Run: the hooks around each step."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
from data import Data
from samestep import NonRetryableError
from samestep.run import Run, StepActions
from samestep.step_timer import COMMUNICATION, INPUT
from samestep.torch import reduction
from torch.nn.parallel import DistributedDataParallel


class RunCallback(pl.Callback):
    """Do what a training loop does around the step itself: report to the Run, and act on its answer."""

    def __init__(self, run: Run, data: Data) -> None:
        self.run = run
        self.data = data
        self.actions = StepActions(sync=False, log=False, evaluate=False, save=False)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let Lightning count from the start of training, as after loading a checkpoint of its own."""
        fit = trainer.fit_loop
        first = self.run.first_step
        epoch = first // len(self.data.sampler)
        current: Any = fit.epoch_progress.current
        current.processed = epoch
        current.completed = epoch  # current_epoch
        # global_step, without and with --virtual-ranks
        fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = first
        fit.epoch_loop.manual_optimization.optim_step_progress.total.completed = first
        fit.epoch_loop.on_load_checkpoint({"_batches_that_stepped": first})  # the step that its loggers get

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.stop_request.install()  # Lightning's handler of TERM would communicate at once
        ddp = trainer.strategy.model  # the module, wrapped
        assert isinstance(ddp, DistributedDataParallel)
        if not self.data.sampler.virtual_ranks:
            reduction.register_ordered_hook(ddp, self.run.timer)
        reduction.time_phases(ddp, trainer.optimizers[0], self.run.timer)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.run.timer.mark(INPUT)  # which run.batches began

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.timer.mark(COMMUNICATION)  # backward() is a part of Lightning's optimizer step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the actions that follow an update; training_step returned ``outputs``."""
        self.actions = self.run.after_step(outputs["loss_sum"])
        if self.actions.sync:
            self.actions = self.run.sync()  # collective: losses, stop requests, phase times
        # By this, Lightning now decides whether to validate. It always validates at the end of its part of an epoch.
        trainer.val_check_batch = 1 if self.actions.evaluate else math.inf
        if self.actions.log and not self.actions.evaluate:
            self.log_step(trainer, pl_module, {})  # collective

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Log the step after which Lightning has validated.

        If --max-steps or a resume cuts an epoch, Lightning's ends too: it has validated for the result alone.
        """
        if self.actions.evaluate:
            self.log_step(trainer, pl_module, pl_module.eval_metrics)  # collective

    def log_step(self, trainer: pl.Trainer, module: Any, evaluation: dict[str, Any]) -> None:
        """Log the last step, also to Lightning's loggers, and save a checkpoint if that follows."""
        line = self.run.log_metrics(evaluation)
        self.log_line(trainer, line)
        if self.actions.save:
            self.run.save()  # collective: compare replicas

    def log_line(self, trainer: pl.Trainer, line: dict[str, Any]) -> None:
        """Give Lightning's loggers a line of metrics.jsonl. They write on rank 0 alone."""
        values = {name: value for name, value in line.items() if name != "step"}
        try:
            for logger in trainer.loggers:
                logger.log_metrics(values, line["step"])
                if self.actions.save:  # a job that resumes from this checkpoint repeats later lines
                    logger.save()
        except OSError as error:
            raise NonRetryableError(f"cannot write Lightning's log: {error.strerror}: {error.filename}") from error

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.stop_request.install()  # if it validates without training

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.run.monitor.beat()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Exit at once with the exit codes of `log.run`: Lightning's own shutdown may wait, and turns Ctrl-C into 1."""
        raise exception
