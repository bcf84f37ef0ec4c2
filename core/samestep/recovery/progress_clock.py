"""Measure how long a rank has made no progress."""

from __future__ import annotations

import time


class ProgressClock:
    """Count a rank's updates, and the seconds since the last progress.

    Attributes:
        step: number of updates done, also by earlier processes.
        first_step: ``step`` when this process began.
        updates: number of updates that this process has done.
        last_progress: when it last made progress, by `time.monotonic`.
        is_compiling: whether the limit of a first step holds.
    """

    def __init__(self) -> None:
        self.step = 0
        self.first_step = 0
        self.updates = 0
        self.last_progress = time.monotonic()
        self.is_compiling = False
        self._timeout = 0.0
        self._first_step_timeout: float | None = None

    def start(self, timeout: float, first_step_timeout: float | None) -> None:
        """Start to measure, with a first step that may compile.

        Args:
            timeout: seconds without progress that are allowed.
            first_step_timeout: seconds that are allowed for a first step; None for no such limit of its own.
        """
        self._timeout = timeout
        self._first_step_timeout = first_step_timeout
        self.expect_compilation()
        self.restart()

    def expect_compilation(self) -> None:
        """Allow as much time as for a first step, until the next `beat`."""
        self.is_compiling = self._first_step_timeout is not None

    def restart(self) -> None:
        """Measure from now on."""
        self.last_progress = time.monotonic()

    def resume_at(self, step: int) -> None:
        """Note that earlier processes have done ``step`` updates."""
        self.step = step
        self.first_step = step
        self.restart()

    def beat(self, step: int | None) -> None:
        """Note progress, and after an update the number of updates done."""
        self.restart()
        self.is_compiling = False
        if step is not None:
            self.step = step
            self.updates += 1

    def limit(self) -> float:
        """Return the seconds without progress that are allowed now."""
        if self.is_compiling and self._first_step_timeout:
            return self._first_step_timeout
        return self._timeout

    def waited(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self.last_progress
