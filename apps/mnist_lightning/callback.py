"""Connect Lightning's Trainer to samestep's `Run` by hooks around each step."""

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
    """Report each step to the `Run`, and log, evaluate or save if the `Run` returns these actions."""

    def __init__(self, run: Run, data: Data) -> None:
        self.run = run
        self.data = data
        self.actions = StepActions(sync=False, log=False, evaluate=False, save=False)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set Lightning's counters to the first step, as if Lightning had loaded its own checkpoint.

        Raises:
            NonRetryableError: a resume would not continue a setting of Lightning.
        """
        if trainer.lr_scheduler_configs:
            raise NonRetryableError("no checkpoint has an lr_scheduler: set the rate from run.step in training_step")
        if trainer.accumulate_grad_batches != 1:
            raise NonRetryableError("accumulate_grad_batches would count each batch as a step: leave it at 1")
        fit = trainer.fit_loop
        first = self.run.first_step
        epoch = first // len(self.data.sampler)
        current: Any = fit.epoch_progress.current
        current.processed = epoch
        current.completed = epoch  # trainer.current_epoch
        # trainer.global_step is the first counter, or the second counter with --virtual-ranks.
        fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = first
        fit.epoch_loop.manual_optimization.optim_step_progress.total.completed = first
        fit.epoch_loop.on_load_checkpoint({"_batches_that_stepped": first})  # Lightning's loggers use this step number

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.stop_request.install()  # replaces Lightning's SIGTERM handler, which communicates immediately
        ddp = trainer.strategy.model  # DDP, which wraps the module
        assert isinstance(ddp, DistributedDataParallel)
        if not self.data.sampler.virtual_ranks:
            reduction.register_ordered_hook(ddp, self.run.timer)
        reduction.time_phases(ddp, trainer.optimizers[0], self.run.timer)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.run.timer.mark(INPUT)  # ends the phase that run.batches began

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.timer.mark(COMMUNICATION)  # backward() is a part of Lightning's optimizer step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count an update, and start the actions that follow. ``outputs`` is the result of training_step."""
        self.actions = self.run.after_step(outputs["loss_sum"])
        if self.actions.sync:
            self.actions = self.run.sync()  # collective: exchange losses, stop requests and phase times
        # Lightning now validates if val_check_batch is 1. It also validates at the end of each loader.
        trainer.val_check_batch = 1 if self.actions.evaluate else math.inf
        if self.actions.log and not self.actions.evaluate:
            self.log_step(trainer, pl_module, {})  # collective

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Log the step that precedes this validation, if the `Run` requested an evaluation.

        Lightning also validates at the end of an epoch that --max-steps shortens. The app uses this validation for the
        result, but not for a log line.
        """
        if self.actions.evaluate:
            self.log_step(trainer, pl_module, pl_module.eval_metrics)  # collective

    def log_step(self, trainer: pl.Trainer, module: Any, evaluation: dict[str, Any]) -> None:
        """Log the last step to metrics.jsonl and Lightning's loggers, and save a checkpoint if one is due."""
        line = self.run.log_metrics(evaluation)
        self.log_line(trainer, line)
        if self.actions.save:
            self.run.save()  # collective: compare replicas

    def log_line(self, trainer: pl.Trainer, line: dict[str, Any]) -> None:
        """Pass a line of metrics.jsonl to Lightning's loggers, which write only on rank 0.

        Raises:
            NonRetryableError: a logger cannot write its file.
        """
        values = {name: value for name, value in line.items() if name != "step"}
        try:
            for logger in trainer.loggers:
                logger.log_metrics(values, line["step"])
                if self.actions.save:  # a resume from this checkpoint repeats only later lines
                    logger.save()
        except OSError as error:
            raise NonRetryableError(f"cannot write Lightning's log: {error.strerror}: {error.filename}") from error

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.stop_request.install()  # necessary if validation runs without training

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.run.monitor.beat()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Re-raise the exception, so that the process exits immediately with the exit code of `log.run`.

        Lightning's own handling may wait for other ranks, and exits with 1 after Ctrl-C.
        """
        raise exception
