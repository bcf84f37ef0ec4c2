"""Where do a step's seconds go? A clock that a rank reads where a phase of its step ends."""

from __future__ import annotations

import time

PHASES = ("input", "computing", "waiting", "optimizer")  # in this order; computing ends with the last gradient


class Phases:
    """Seconds of this rank's phases since `take`; what is between a step's last phase and the next `begin` is in none.

    They are the host's: what it has only handed to a GPU is in the phase in which the host waits for it, if in any.
    """

    def __init__(self) -> None:
        self._seconds, self._mark = dict.fromkeys(PHASES, 0.0), 0.0

    def begin(self) -> None:
        """A step begins."""
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        """What came since the last mark was ``phase``. Again, it adds up: so each gradient can say it, and the last."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._mark
        self._mark = now

    def take(self) -> list[float]:
        """The seconds, in the order of PHASES, to be counted from 0 again."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return list(taken.values())
