"""Compute from an update's number which actions follow the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StepActions(NamedTuple):
    """The actions after an update, which are the same on all ranks."""

    sync: bool  # reduce losses and counters over ranks (`samestep.step_sync`); True if `log` is True
    log: bool  # write a line of metrics.jsonl; True if `evaluate` or `save` is True
    evaluate: bool  # evaluate the model
    save: bool  # write a checkpoint


@dataclass(frozen=True)
class Cadence:
    """The settings that determine after which updates a run logs, evaluates and saves.

    Attributes:
        log_every: interval of log lines, in updates, in addition to a line after each evaluation or save.
        evaluate_every: interval of evaluations, in updates, in addition to one after each epoch; 0 for no interval.
        checkpoint_every: interval of checkpoints, in updates, in addition to one after each epoch and after the last
            update; 0 for no interval.
        steps_per_epoch: updates per epoch, at least 1.
        last_step: number of the run's last update.
        keep_best: whether to save after each evaluation, and to evaluate after the last update.
    """

    log_every: int
    evaluate_every: int
    checkpoint_every: int
    steps_per_epoch: int
    last_step: int
    keep_best: bool = False

    def after(self, done: int, is_sync_due: bool = False) -> StepActions:
        """Return the actions after ``done`` updates.

        If ``is_sync_due`` is True, ``sync`` is True even if no log line is due.
        """
        is_last = done == self.last_step
        is_epoch_end = done % self.steps_per_epoch == 0
        evaluates = is_epoch_end or _is_multiple(done, self.evaluate_every)
        saves = is_epoch_end or is_last or _is_multiple(done, self.checkpoint_every)
        if self.keep_best:
            evaluates = evaluates or is_last
            saves = saves or evaluates
        logs = evaluates or saves or _is_multiple(done, self.log_every)
        return StepActions(sync=logs or is_sync_due, log=logs, evaluate=evaluates, save=saves)


def _is_multiple(done: int, every: int) -> bool:
    """Return whether ``done`` is a multiple of ``every``; False if ``every`` is 0."""
    return every > 0 and done % every == 0
