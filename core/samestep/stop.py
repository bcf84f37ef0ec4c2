"""Turn signals into stop requests on which all ranks agree.

After TERM, USR1 (Slurm's ``--signal``) or the first Ctrl-C, all ranks agree on a step, save it and exit with 128 + the
signal. A rank exits without saving in these cases:

* The rank receives a second signal, or a signal before its first step.
* No step is saved within ``grace`` seconds.
* Another rank has ended. A launcher then sends TERM, and with NCCL the remaining ranks would wait for the ended rank.

A thread handles the signals, because the main thread may wait in C code.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from samestep import child_signals

STOP_SIGNALS = child_signals.STOP_SIGNALS
LOST_SECONDS = 2.0  # seconds from a stop signal to the check whether another rank has ended
REPEAT_SECONDS = 1.0  # seconds within which repeated signals count as one, because launchers repeat signals
_RELEASE = 255  # byte in the pipe that ends the thread; no signal has this number


class Stopped(BaseException):
    """A request to end the job. It is a BaseException, so that a program's ``except Exception`` does not catch it."""

    def __init__(self, number: int, text: str, is_final: bool = True) -> None:
        """Describe a stop.

        Args:
            number: the signal.
            text: message for the log.
            is_final: whether the launch script exits with this signal's code. Otherwise the signal may be a launcher's
                reaction to a failure, and a restart may help.
        """
        super().__init__(text)
        self.exit_code = 128 + number
        self.is_final = is_final


class _Released(Exception):
    """The thread that receives signals must end."""


class StopRequest:
    """Receive stop signals on this rank, and exit if the ranks cannot save a step in time."""

    def __init__(
        self, grace: float, exit_now: Callable[[Stopped], None], rank_is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        """Store the settings. `install` installs the signal handlers.

        Args:
            grace: seconds in which the ranks must agree on a step.
            exit_now: function that ends the process at once, from any thread.
            rank_is_lost: function that returns whether another rank on this machine has ended.
        """
        self.number = 0  # the signal that this rank received, or 0
        self.in_training = False  # whether this rank has begun its first step; until then, ranks cannot agree on a step
        self._grace = grace
        self._exit_now = exit_now
        self._rank_is_lost = rank_is_lost
        self._read_end = self._write_end = -1
        self._former: dict[int, Any] = {}  # handlers from before `install`, by signal
        self._former_descriptor = -1  # wakeup descriptor from before `install`, or -1
        self._is_answered = False  # whether `release` was called after an answer to the signal

    def install(self) -> None:
        """Install the signal handlers. Call this method again after a framework has installed its own handlers."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
            return
        if self._read_end < 0:
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            threading.Thread(target=self._signal_thread, name="signals", daemon=True).start()
            child_signals.install()
        child_signals.unblock()
        # Python writes a signal's number to the pipe.
        former_descriptor = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if former_descriptor != self._write_end:
            self._former_descriptor = former_descriptor
        for number in STOP_SIGNALS:
            former = signal.signal(number, lambda number, frame: None)
            self._former.setdefault(number, former)
            signal.siginterrupt(number, False)  # the C++ code of some frameworks fails if a system call is interrupted

    def release(self, is_answered: bool) -> None:
        """Install the former signal handlers and wakeup descriptor again, and end this object's thread.

        Args:
            is_answered: whether the ranks have agreed on a signal. Otherwise, this process sends a signal that it has
                received to itself again.
        """
        if not self._former or threading.current_thread() is not threading.main_thread():
            return
        self._is_answered = is_answered
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            # A handler from C code is None here, and cannot be installed again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()
        os.write(self._write_end, bytes([_RELEASE]))

    def _signal_thread(self) -> None:
        try:
            self._await_signals()
        except _Released:
            os.close(self._read_end)
            os.close(self._write_end)
            if self.number and not self._is_answered:
                os.kill(os.getpid(), self.number)

    def _await_signals(self) -> None:
        self.number = first = self._next_signal(None)
        name = signal.Signals(first).name
        if not self.in_training:
            self._exit_now(Stopped(first, f"stopped by {name} before the first step", is_final=False))
        why = self._wait_until_hopeless(time.monotonic())
        self._exit_now(Stopped(first, f"stopped by {name}, unsaved: {why}", is_final=False))

    def _wait_until_hopeless(self, begun: float) -> str:
        """Wait until no step can be saved, and return the reason. A rank that saves a step exits during the wait.

        Args:
            begun: time of the first signal, on the clock `time.monotonic`.
        """
        repeats_end = begun + min(REPEAT_SECONDS, self._grace)
        for deadline in (begun + min(LOST_SECONDS, self._grace), begun + self._grace):
            while self._next_signal(deadline):
                if time.monotonic() >= repeats_end:
                    return "a second signal"
            if self._rank_is_lost():
                return "another rank has ended"
        return f"no step could be saved within {self._grace:g} s (--grace)"

    def _next_signal(self, deadline: float | None) -> int:
        """Return the next stop signal, or 0 at ``deadline`` on the clock `time.monotonic`.

        Raises:
            _Released: `release` was called.
        """
        while select.select([self._read_end], [], [], deadline and max(0.0, deadline - time.monotonic()))[0]:
            number = os.read(self._read_end, 1)[0]
            if number == _RELEASE:
                raise _Released
            if number in STOP_SIGNALS:
                return number
        return 0

    def encode(self, launcher_died: bool = False) -> tuple[float, ...]:
        """Return this rank's votes to sum over ranks: one for each stop signal, and one for an ended launcher."""
        return (*(float(self.number == number) for number in STOP_SIGNALS), float(launcher_died))


def decode(sums: Sequence[float]) -> tuple[int, bool]:
    """Return (signal that a rank received or 0, whether a launcher has ended) from the summed votes.

    Args:
        sums: the sums of all ranks' `StopRequest.encode`.
    """
    return next((int(number) for number, votes in zip(STOP_SIGNALS, sums) if votes), 0), sums[-1] > 0
