"""Is this job to stop? A signal to any rank becomes a wish, which all ranks hear of when they next talk.

TERM, USR1 (Slurm's ``--signal``) and the first Ctrl-C ask for the same: that all ranks agree on a step, save it and
end, with exit code 128 + the signal. A rank ends at once at a second signal, at one before its first step, and when the
others have not agreed within ``grace`` seconds. That is a thread's work: a rank may wait in C for long.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

WISHES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A wish travels as a number that is summed over ranks, one digit for each signal, and one for ranks whose launcher is
# gone: as float64 exact to 8,191 ranks.
DIGIT = 2**13
SAME = 1.0  # seconds in which what follows a signal is the same one: launchers repeat theirs, a terminal tells a group


class Stopped(BaseException):
    """The job was asked to stop, and does. Not an Exception: no program's except clause is meant for it."""

    def __init__(self, number: int, said: str, stands: bool = True) -> None:
        """``stands``: the launch script ends with this signal's code. Else the signal may be a launcher's, after a
        failure that a new start mends."""
        super().__init__(said)
        self.exit_code, self.stands = 128 + number, stands


class Wish:
    """What this rank was asked for."""

    def __init__(self, grace: float, leave: Callable[[Stopped], None]) -> None:
        """``leave`` ends the process at once, from any thread."""
        self.number = 0  # the signal that came in
        self.waits = False  # whether there are steps, after which the ranks talk
        self._grace, self._leave = grace, leave
        self._pipe = self._writing = -1

    def listen(self) -> None:
        """Take signals from here on; again where a framework has put handlers of its own in place."""
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            return
        if self._pipe < 0:
            self._pipe, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            threading.Thread(target=self._attend, name="signals", daemon=True).start()
            os.register_at_fork(after_in_child=_forget)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)  # each signal's number, as soon as it comes in
        for number in WISHES:
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)  # some frameworks' C++ takes an interrupted call for an error

    def _attend(self) -> None:
        self.number = first = self._next(None)
        begun = time.monotonic()
        if not self.waits:
            self._leave(Stopped(first, f"stopped by {signal.Signals(first).name} before the first step", stands=False))
        while (second := self._next(begun + self._grace)) and time.monotonic() < begun + min(SAME, self._grace):
            pass
        why = "a second signal" if second else f"no step could be saved within {self._grace:g} s (--grace)"
        self._leave(Stopped(first, f"stopped by {signal.Signals(first).name}, unsaved: {why}", stands=False))

    def _next(self, until: float | None) -> int:
        """The next signal that asks for an end; 0 where none comes in time, on the clock `time.monotonic`."""
        while select.select([self._pipe], [], [], until and max(0.0, until - time.monotonic()))[0]:
            number = os.read(self._pipe, 1)[0]
            if number in WISHES:
                return number
        return 0

    def as_number(self, orphaned: bool = False) -> float:
        """For the sum over ranks."""
        wish = DIGIT ** WISHES.index(signal.Signals(self.number)) if self.number else 0
        return float(wish + orphaned * DIGIT ** len(WISHES))


def _forget() -> None:
    """In a forked child, a loader's worker say: signals to it are its own, and end it."""
    signal.set_wakeup_fd(-1)
    for number in WISHES:
        signal.signal(number, signal.SIG_DFL)


def heard(total: float) -> tuple[int, bool]:
    """The signal that any rank wishes to stop for, of the sum of all ranks' numbers, 0 for none; are there orphans?"""
    digits = [int(total) // DIGIT**i % DIGIT for i in range(len(WISHES) + 1)]
    return next((number for number, wishes in zip(WISHES, digits) if wishes), 0), digits[-1] > 0
