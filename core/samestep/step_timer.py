"""Measure the seconds of each phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

# A straggler's field ``phase`` in metrics.jsonl has one of these values, except COMMUNICATION.
INPUT = "input"
COMPUTE = "computing"  # ends with the step's last gradient
COMMUNICATION = "waiting"
OPTIMIZER = "optimizer"
PHASES = (INPUT, COMPUTE, COMMUNICATION, OPTIMIZER)


class StepTimer:
    """Sum the seconds of each phase on this rank, without the time between a step's last mark and the next `phase`.

    The host's clock measures the seconds. The time of GPU kernels counts in the phase in which the host waits for them.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the context as phase ``name``."""
        self._mark = time.perf_counter()
        yield
        self.mark(name)

    def mark(self, phase: str) -> None:
        """Count the seconds since the last mark as ``phase``. Several marks of a phase add up."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._mark
        self._mark = now

    def pop(self) -> list[float]:
        """Return the seconds in the order of PHASES and reset them."""
        seconds = self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return list(seconds.values())
