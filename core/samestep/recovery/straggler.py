"""Find ranks that slow the others down, from the seconds of all ranks' phases. Only rank 0 does this.

A rank's local time is the time in which it does not wait for others: input, compute, optimizer. A rank is slow over a
window of steps if its local time is more than ``factor`` times the median of the others'. The difference must also
exceed noise: MIN_SHARE of the steps' time. It is reported if it was slow in consecutive windows of MIN_STEPS steps and
cost MIN_SECONDS in all. A burst of other work on its machine slows one window and is over in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import log
from samestep.step_timer import COMMUNICATION, PHASES

WINDOW_STEPS = 10  # minimum; a window ends at a sync of all ranks
MIN_STEPS = 50
MIN_SHARE = 0.1
MIN_SECONDS = 1.0
LOCAL_PHASES = [index for index, phase in enumerate(PHASES) if phase != COMMUNICATION]

Seconds = NDArray[np.float64]


class StragglerDetector:
    """Report each straggler once, with the phase in which it loses the most time."""

    def __init__(self, factor: float, world_size: int, global_batch_size: int, step: int, condition: str = "") -> None:
        """Start after ``step`` updates.

        A rank may have one sample of a global batch more than another. That much more time is allowed: ``factor`` is
        multiplied by it. Each rank must have at least one sample.

        Args:
            factor: how many times as long as the others' median a straggler takes.
            world_size: number of ranks.
            global_batch_size: samples of a step, over all ranks.
            step: number of updates done.
            condition: a fact of the job that the warnings add, such as "3 ranks share 2 processors".
        """
        fewest = global_batch_size // world_size
        most = -(-global_batch_size // world_size)
        self._condition = f"{condition}, " if condition else ""
        self._factor = factor * most / fewest
        self._is_warm = False
        self._window = np.zeros((world_size, len(PHASES)))
        self._window_start = step
        # By rank, for ranks that were slow in the last window: since which step, and all seconds since then.
        self._slow: dict[int, tuple[int, Seconds]] = {}
        self._reported: set[int] = set()

    def update(self, step: int, phase_seconds: Sequence[float]) -> list[dict[str, Any]]:
        """Add the seconds since the last call, and log a warning for each new straggler.

        Args:
            step: the number of updates done.
            phase_seconds: [world_size x phases], each rank's seconds in the order of PHASES.

        Returns:
            The new stragglers: ``rank``, ``phase``, its ``seconds`` per step in that phase, the ``others``' median.
        """
        if not self._is_warm:  # the first step allocates memory and chooses kernels
            self._is_warm = True
            self._window_start = step
            return []
        self._window += np.reshape(phase_seconds, self._window.shape)
        if step - self._window_start < WINDOW_STEPS:
            return []
        before = self._slow
        self._slow = {}
        for rank in self._slow_ranks():
            first_step, seconds = before.get(rank, (self._window_start, np.zeros_like(self._window)))
            self._slow[rank] = first_step, seconds + self._window
        self._window = np.zeros_like(self._window)
        self._window_start = step
        return [self._report(rank, step) for rank in self._slow if self._is_confirmed(rank, step)]

    def _slow_ranks(self) -> list[int]:
        """Return the ranks that are slow in the current window."""
        local = self._window[:, LOCAL_PHASES].sum(axis=1)
        others = leave_one_out_median(local)
        noise = MIN_SHARE * self._window.sum(axis=1)
        is_slow = (local > self._factor * others) & (local - others > noise)
        return [int(rank) for rank in np.flatnonzero(is_slow)]

    def _is_confirmed(self, rank: int, step: int) -> bool:
        """Return whether a slow rank was slow for long enough, and is not reported yet."""
        if rank in self._reported:
            return False
        first_step, seconds = self._slow[rank]
        local = seconds[:, LOCAL_PHASES].sum(axis=1)
        cost = local - leave_one_out_median(local)
        return step - first_step >= MIN_STEPS and float(cost[rank]) >= MIN_SECONDS

    def _report(self, rank: int, step: int) -> dict[str, Any]:
        self._reported.add(rank)
        first_step, seconds = self._slow[rank]
        steps = step - first_step
        own = (seconds[rank] / steps).tolist()
        others = []
        for phase_seconds in seconds.T:
            median = leave_one_out_median(phase_seconds)
            others.append(float(median[rank]) / steps)
        worst = max(LOCAL_PHASES, key=lambda index: own[index] - others[index])
        phase = PHASES[worst]
        others_median = others[worst]
        log.warning(
            f"rank {rank} is a straggler: {own[worst]:.3f} s per step in {phase}, the others {others_median:.3f} "
            f"({self._condition}over {steps} steps to step {step}); reported once"
        )
        return {"rank": rank, "phase": phase, "seconds": round(own[worst], 6), "others": round(others_median, 6)}


def leave_one_out_median(seconds: Seconds) -> Seconds:
    """Return for each of two or more ranks the median of all others' ``seconds`` [world_size]."""
    ordered = np.sort(seconds)
    others = len(seconds) - 1
    low = _without_own(seconds, ordered, place=(others - 1) // 2)
    high = _without_own(seconds, ordered, place=others // 2)
    return np.asarray((low + high) / 2)


def _without_own(seconds: Seconds, ordered: Seconds, place: int) -> Seconds:
    """Return for each rank the value at ``place`` in the order of all others' seconds."""
    return np.asarray(np.where(seconds > ordered[place], ordered[place], ordered[place + 1]))
