"""Measure the time since a rank's last progress."""

from __future__ import annotations

import time


class ProgressClock:
    """Count a rank's updates, and the seconds since the last progress.

    Attributes:
        step: number of updates done, including the updates of earlier processes.
        first_step: value of ``step`` at the start of this process.
        updates: number of updates that this process has done.
        last_progress: time of the last progress, on the clock `time.monotonic`.
        is_compiling: whether the time limit of a first step applies.
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
        """Start measuring, with the time limit of a first step until the first `beat`.

        Args:
            timeout: maximum seconds without progress.
            first_step_timeout: maximum seconds of a first step; None to use ``timeout``.
        """
        self._timeout = timeout
        self._first_step_timeout = first_step_timeout
        self.expect_compilation()
        self.restart()

    def expect_compilation(self) -> None:
        """Apply the time limit of a first step until the next `beat`."""
        self.is_compiling = self._first_step_timeout is not None

    def restart(self) -> None:
        """Set the time of the last progress to now."""
        self.last_progress = time.monotonic()

    def resume_at(self, step: int) -> None:
        """Set the number of updates that earlier processes have done."""
        self.step = step
        self.first_step = step
        self.restart()

    def beat(self, step: int | None) -> None:
        """Record progress. After an update, ``step`` is the number of updates done; otherwise it is None."""
        self.restart()
        self.is_compiling = False
        if step is not None:
            self.step = step
            self.updates += 1

    def limit(self) -> float:
        """Return the maximum seconds without progress that apply now."""
        if self.is_compiling and self._first_step_timeout:
            return self._first_step_timeout
        return self._timeout

    def waited(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self.last_progress
