"""Find stragglers, ranks that slow down all others, by the phase times of all ranks. Only rank 0 runs this module.

A rank's local time is its time in the phases "input", "computing" and "optimizer", without waits for other ranks. A
rank is slow in a window of steps if its local time exceeds ``factor`` times the median of the other ranks' local times.
To exclude noise, the difference to the median must also exceed MIN_SHARE of the window's time.

A rank is reported if it is slow in consecutive windows over at least MIN_STEPS steps, and loses at least MIN_SECONDS in
them. A short burst of other work on a machine slows only one window, and is not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import log
from samestep.step_timer import COMMUNICATION, PHASES

WINDOW_STEPS = 10  # minimum steps of a window, which ends at a sync of all ranks
MIN_STEPS = 50
MIN_SHARE = 0.1
MIN_SECONDS = 1.0
LOCAL_PHASES = [index for index, phase in enumerate(PHASES) if phase != COMMUNICATION]

Seconds = NDArray[np.float64]


class StragglerDetector:
    """Report each straggler once, with the phase in which the straggler loses the most time."""

    def __init__(self, factor: float, world_size: int, global_batch_size: int, step: int, condition: str = "") -> None:
        """Prepare the detector of a run that has done ``step`` updates.

        The shards of a global batch may differ by one sample. Therefore ``factor`` is multiplied by the ratio of the
        largest shard to the smallest. Each rank must have at least one sample.

        Args:
            factor: minimum ratio of a straggler's local time to the others' median.
            world_size: number of ranks.
            global_batch_size: samples of a step, over all ranks.
            step: number of updates done.
            condition: a fact to add to the warnings, such as "3 ranks share 2 processors", or "".
        """
        fewest = global_batch_size // world_size
        most = -(-global_batch_size // world_size)
        self._condition = f"{condition}, " if condition else ""
        self._factor = factor * most / fewest
        self._is_warm = False
        self._window = np.zeros((world_size, len(PHASES)))
        self._window_start = step
        # For each rank that was slow in the last window: the first step of its slow windows, and all ranks' seconds
        # in these windows.
        self._slow: dict[int, tuple[int, Seconds]] = {}
        self._reported: set[int] = set()

    def update(self, step: int, phase_seconds: Sequence[float]) -> list[dict[str, Any]]:
        """Add the seconds since the last call, and log a warning for each new straggler.

        Args:
            step: number of updates done.
            phase_seconds: [world_size * phases], each rank's seconds in the order of PHASES.

        Returns:
            For each new straggler: ``rank``, ``phase``, ``seconds`` (its seconds per step in the phase), and ``others``
            (the others' median).
        """
        if not self._is_warm:  # skip the first step, which allocates memory and chooses kernels
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
        """Return whether to report a slow rank now: after MIN_STEPS slow steps that cost MIN_SECONDS, and only once."""
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
    """Return, for each rank, the median of all other ranks' seconds.

    Args:
        seconds: float64 [world_size], for two or more ranks.

    Returns:
        float64 [world_size].
    """
    ordered = np.sort(seconds)
    others = len(seconds) - 1
    low = _without_own(seconds, ordered, place=(others - 1) // 2)
    high = _without_own(seconds, ordered, place=others // 2)
    return np.asarray((low + high) / 2)


def _without_own(seconds: Seconds, ordered: Seconds, place: int) -> Seconds:
    """Return, for each rank, the value at index ``place`` of all other ranks' seconds in ascending order."""
    return np.asarray(np.where(seconds > ordered[place], ordered[place], ordered[place + 1]))
