"""Count the updates of a run, and sum the losses of an epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from samestep import ConfigError
from samestep.best import BestEvaluation
from samestep.sharding import GlobalBatches
from samestep.step_sync import Totals


class Progress:
    """The counters and losses of a run, which a checkpoint stores beside its arrays.

    Attributes:
        batches: the global batches of the run.
        first_step: updates done before this start.
        last_step: number of the run's last update.
        step: updates done.
        train_loss: the mean loss over the epoch so far, at the last log line; None before the run's first line.
        train_accuracy: the accuracy over the epoch so far, at the last log line; None before the first line of this
            start, and if the app does not count correct answers.
        evaluation: the evaluation of the last log line; {} without an evaluation.
        best: the best evaluation.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        first_step: int,
        last_step: int,
        state: Mapping[str, Any],
        seconds: float = 0.0,
        keep_best: bool | str = False,
    ) -> None:
        """Restore the counters of a run that has done ``first_step`` updates.

        Args:
            batches: the global batches of the run.
            first_step: updates done before this start.
            last_step: number of the run's last update.
            state: the result of `state` that the checkpoint stores; {} for a new run.
            seconds: the total duration of earlier starts, in seconds.
            keep_best: the value of --keep-best.

        Raises:
            ConfigError: the checkpoint's run has another number of training examples.
        """
        stored = state.get("train_examples", batches.n)
        if stored != batches.n and first_step < last_step:
            raise ConfigError(
                f"the run was trained on {stored:,} examples, not on {batches.n:,}, and their order depends on their "
                "number: restore the dataset, or pass another --run-dir"
            )
        self.batches = batches
        self.first_step = first_step
        self.last_step = last_step
        self.step = first_step
        self.train_loss: float | None = state.get("train_loss")
        self.train_accuracy: float | None = None
        self.evaluation: dict[str, Any] = {}
        self.best = BestEvaluation(state.get("best"), keep_best)
        self._epoch_loss: float = state.get("epoch_loss_sum", 0.0)  # sum of the losses of the epoch so far
        self._epoch_correct: float = state.get("epoch_correct", 0.0)
        self._log_time = time.monotonic()
        self._log_samples = batches.samples_seen(first_step)
        self._begin = self._log_time - seconds

    @property
    def seconds(self) -> float:
        """The duration of the run in seconds, over all its starts."""
        return time.monotonic() - self._begin

    @property
    def num_losses(self) -> int:
        """The number of losses that the last update's mean loss averages: one per sample or target token."""
        return self.batches.num_losses(self.step - 1)

    def step_losses(self, totals: Totals) -> list[tuple[int, float]]:
        """Return (step, mean loss) of each step since the last sync, up to the current step."""
        first = self.step - len(totals.step_losses)
        losses = enumerate(totals.step_losses, start=first)
        return [(step + 1, loss_sum / self.batches.num_losses(step)) for step, loss_sum in losses]

    def add(self, totals: Totals) -> dict[str, Any]:
        """Add the totals since the last log line, and return the fields of the new line in metrics.jsonl's order."""
        batches = self.batches
        epoch = batches.epoch(self.step - 1)
        samples = batches.samples_seen(self.step)
        losses_before = batches.num_losses_before(epoch * batches.steps_per_epoch)
        losses_in_epoch = batches.num_losses_before(self.step) - losses_before
        self._epoch_loss += totals.running_loss
        self._epoch_correct += totals.counts.get("correct", 0.0)
        self.train_loss = self._epoch_loss / losses_in_epoch
        self.train_accuracy = None
        if "correct" in totals.counts:
            self.train_accuracy = self._epoch_correct / losses_in_epoch
        if self.step % batches.steps_per_epoch == 0:
            self._epoch_loss = 0.0
            self._epoch_correct = 0.0
        loss = totals.loss / self.num_losses
        line = {"step": self.step, "epoch": epoch, "samples_seen": samples, "loss": loss}
        new_samples = samples - self._log_samples
        for name, count in totals.counts.items():
            line[name.replace("correct", "accuracy", 1)] = count / new_samples
        now = time.monotonic()
        line["samples_per_second"] = round(new_samples / (now - self._log_time), 1)
        self._log_time = now
        self._log_samples = samples
        return line

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        state: dict[str, Any] = {
            "train_examples": self.batches.n,
            "epoch_loss_sum": self._epoch_loss,
            "epoch_correct": self._epoch_correct,
            "train_loss": self.train_loss,
            "seconds": self.seconds,
        }
        if self.best.state:
            state["best"] = self.best.state
        return state
