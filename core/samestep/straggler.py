"""Who holds the others up? Rank 0 alone judges, by the seconds of all ranks' phases; no other rank imports this.

A rank's own time is what it does not wait for others: input, computing, optimizer. A rank is slow over some steps where
its own time is more than ``factor`` times the median of the others', and the difference is more than noise would make:
SHARE of the steps' time. It is named when it was slow in each part of STEPS steps in a row, and cost the others COST
seconds by then: one burst of other work on its machine slows one part, and is over in the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import log
from samestep.phases import PHASES

STEPS, PART = 50, 10  # steps in a row, in parts of so many or more: from one talk of all ranks to another
SHARE, COST = 0.1, 1.0
OWN = [index for index, phase in enumerate(PHASES) if phase != "waiting"]

Seconds = NDArray[np.float64]


class Judge:
    """Names each slow rank once, with the phase in which it loses the most."""

    def __init__(self, factor: float, world_size: int, global_batch_size: int, step: int) -> None:
        """Training begins after ``step`` updates. A rank may have one sample more than another of the global batch,
        which has one for each at least: so much more is no slowness."""
        self._factor = factor * -(-global_batch_size // world_size) / (global_batch_size // world_size)
        self._step, self._warm = step, False
        self._part, self._begun = np.zeros((world_size, len(PHASES))), step
        self._slow: dict[int, tuple[int, Seconds]] = {}  # of a rank that is: its first step, and all seconds since
        self._named: set[int] = set()

    def hear(self, step: int, slots: list[float]) -> list[dict[str, Any]]:
        """The seconds of all ranks' phases since the last call, each rank's in its place, up to ``step`` updates done.

        Warns of who is named now, and returns it: ``rank``, ``phase``, ``seconds`` a step in it, and the ``others``'.
        """
        if not self._warm:  # the first step allocates, and chooses kernels
            self._warm, self._begun = True, step
            return []
        self._part += np.array(slots).reshape(self._part.shape)
        if step - self._begun < PART:
            return []
        own = self._part[:, OWN].sum(axis=1)
        if own.max() <= self._factor * own.min():  # as nearly always: the others wait for rank 0 meanwhile
            self._slow = {}
        else:
            others = of_others(own)
            slow = (own > self._factor * others) & (own - others > SHARE * self._part.sum(axis=1))
            self._slow = {
                rank: (first, seconds + self._part)
                for rank in np.flatnonzero(slow).tolist()
                for first, seconds in [self._slow.get(rank, (self._begun, np.zeros_like(self._part)))]
            }
        self._part, self._begun = np.zeros_like(self._part), step
        return [self._name(rank, step) for rank in self._slow if self._is_proved(rank, step)]

    def _is_proved(self, rank: int, step: int) -> bool:
        first, seconds = self._slow[rank]
        own = seconds[:, OWN].sum(axis=1)
        return rank not in self._named and step - first >= STEPS and bool((own - of_others(own))[rank] >= COST)

    def _name(self, rank: int, step: int) -> dict[str, Any]:
        self._named.add(rank)
        first, seconds = self._slow[rank]
        steps = step - first
        lost = {index: (seconds[:, index] - of_others(seconds[:, index]))[rank] for index in OWN}
        phase = max(lost, key=lambda index: float(lost[index]))
        its, others = seconds[rank, phase] / steps, (seconds[rank, phase] - lost[phase]) / steps
        log.warning(
            f"rank {rank} holds the others up: {its:.3f} s a step in {PHASES[phase]}, the others {others:.3f} "
            f"(over {steps} steps to step {step}); said once"
        )
        return {"rank": rank, "phase": PHASES[phase], "seconds": round(its, 6), "others": round(others, 6)}


def of_others(seconds: Seconds) -> Seconds:
    """For each of two or more ranks the median of all others' ``seconds`` [world_size]."""
    ordered, others = np.sort(seconds), len(seconds) - 1
    place = np.argsort(np.argsort(seconds, kind="stable"), kind="stable")

    def without_it(index: int) -> Seconds:
        found: Seconds = np.where(place > index, ordered[index], ordered[index + 1])
        return found

    return (without_it((others - 1) // 2) + without_it(others // 2)) / 2
