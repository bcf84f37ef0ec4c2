"""Synchronize the ranks of a run: reduce losses and stop requests, and choose the step of the next sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from samestep import stop
from samestep.step_timer import PHASES, StepTimer

SYNCS_PER_GRACE = 6  # number of syncs within --grace seconds
MIN_SECONDS = 1e-6  # minimum seconds per step to assume, because the clock may not have advanced


@dataclass(frozen=True)
class Totals:
    """The numbers of all ranks at a sync.

    Attributes:
        loss: summed loss of the last step's samples, before its update.
        running_loss: summed loss of all samples since the last log line.
        counts: other sums over the samples since the last log line, by name, such as ``correct``.
        stop_signal: the stop signal that a rank received, or 0.
        launcher_died: whether a rank's launcher has ended, so that the stop is a failure.
        seconds_per_step: rank 0's seconds per step since the last sync.
        phase_seconds: [world_size * phases], each rank's seconds since the last sync, in the order of PHASES.
        step_losses: summed loss of each step since the last sync, in order; the last value equals ``loss``.
    """

    loss: float = 0.0
    running_loss: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    stop_signal: int = 0
    launcher_died: bool = False
    seconds_per_step: float = 0.0
    phase_seconds: tuple[float, ...] = ()
    step_losses: tuple[float, ...] = ()


class StepSync:
    """Collect this rank's numbers between two syncs, and reduce them at a sync.

    Attributes:
        stop_request: the object that receives this rank's stop signals.
        timer: the timer of this rank's phases.
        totals: the totals of all ranks at the last sync.
    """

    def __init__(self, stop_request: stop.StopRequest, timer: StepTimer, grace: float) -> None:
        """Plan SYNCS_PER_GRACE syncs within ``grace`` seconds.

        Args:
            stop_request: the object that receives this rank's stop signals.
            timer: the timer of this rank's phases.
            grace: seconds in which the ranks must agree on a step after a stop signal.
        """
        self.stop_request = stop_request
        self.timer = timer
        self.totals = Totals()
        self._grace = grace
        self._unread: list[dict[str, SupportsFloat]] = []  # this rank's sums of each step since the last sync
        self._sums: dict[str, float] = {}  # this rank's sums since the last log line, up to the last sync
        self._last_step = 0
        self._last_time = 0.0
        self._next_step = 0

    def start(self, step: int) -> None:
        """Record that ``step`` updates are done. The first sync follows the next update."""
        self._last_step = step
        self._last_time = time.monotonic()
        self._next_step = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether ranks must synchronize after ``step`` updates, to detect a stop request in time."""
        return step >= self._next_step

    def add(self, loss_sum: SupportsFloat, counts: Mapping[str, SupportsFloat]) -> None:
        """Store this rank's sums of a step. The sums may be tensors, which are not read before `reduce`."""
        self._unread.append({"loss": loss_sum, **counts})

    def reduce(
        self,
        step: int,
        all_gather: Callable[[NDArray[Any]], NDArray[Any]],
        launcher_died: bool = False,
        loss_sum: SupportsFloat | None = None,
        running_loss: SupportsFloat | None = None,
    ) -> Totals:
        """Return the totals of all ranks after ``step`` updates. This call is a collective.

        Args:
            step: number of updates done.
            all_gather: the function `samestep.parts.Collectives.all_gather`.
            launcher_died: whether the launcher of this rank has ended.
            loss_sum: summed loss of this rank's samples of the last step, if `add` did not get the loss.
            running_loss: summed loss of this rank's samples since the last log line, if `add` did not get the losses.
        """
        step_losses = self._read()
        last_loss = step_losses[-1] if step_losses else 0.0
        own = dict(self._sums)
        own_running_loss = own.pop("loss", 0.0)
        if loss_sum is not None:
            last_loss = _number(loss_sum)
            step_losses = [last_loss]
        if running_loss is not None:
            own_running_loss = _number(running_loss)
        steps = max(1, step - self._last_step)
        seconds_per_step = (time.monotonic() - self._last_time) / steps
        row = [
            last_loss,
            own_running_loss,
            seconds_per_step,
            *self.stop_request.encode(launcher_died),
            *self.timer.pop(),
            *own.values(),
            *step_losses,
        ]
        table = all_gather(np.array(row))  # collective; float64 [world_size, numbers]
        totals = _totals(table, list(own))
        self.apply(step, totals)
        return totals

    def apply(self, step: int, totals: Totals) -> None:
        """Set the totals after ``step`` updates, and choose the step of the next sync."""
        self.totals = totals
        seconds_per_step = max(totals.seconds_per_step, MIN_SECONDS)
        steps = int(self._grace / SYNCS_PER_GRACE / seconds_per_step)
        self._last_step = step
        self._last_time = time.monotonic()
        self._next_step = step + max(1, steps)

    def end_log_line(self) -> None:
        """Reset the sums, because a log line contains them."""
        self._sums = {}

    def _read(self) -> list[float]:
        """Add the steps since the last sync to the sums, and return the summed loss of each step."""
        losses = []
        for sums in self._unread:
            losses.append(_number(sums["loss"]))
            for name, value in sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + _number(value)
        self._unread = []
        return losses


def _totals(table: NDArray[Any], names: list[str]) -> Totals:
    """Sum the rows of all ranks.

    Args:
        table: float64 [world_size, numbers], in the order of `StepSync.reduce`.
        names: names of the counts, such as "correct".
    """
    first_phase = 3 + len(stop.STOP_SIGNALS) + 1
    first_count = first_phase + len(PHASES)
    first_loss = first_count + len(names)
    total = table.sum(axis=0).tolist()
    stop_signal, launcher_died = stop.decode(total[3:first_phase])
    return Totals(
        loss=total[0],
        running_loss=total[1],
        counts=dict(zip(names, total[first_count:])),
        stop_signal=stop_signal,
        launcher_died=launcher_died,
        seconds_per_step=float(table[0, 2]),
        phase_seconds=tuple(table[:, first_phase:first_count].ravel().tolist()),
        step_losses=tuple(total[first_loss:]),
    )


def _number(value: SupportsFloat) -> float:
    """Return a loss or count as a float. Prefer ``item``: ``float`` emits a warning for a tensor with gradients."""
    item = getattr(value, "item", None)
    if item is None:
        return float(value)
    return float(item())
