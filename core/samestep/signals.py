"""Is this job to stop? A signal to any rank becomes a wish, which all ranks hear of when they next talk.

TERM, USR1 (Slurm's ``--signal``) and the first Ctrl-C ask for the same: that all ranks agree on a step, save it and
end, with exit code 128 + the signal. A second signal ends this rank at once, as does the first one where no update was
done, because there is nothing to save.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

WISHES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A wish travels as a number that is summed over ranks, one digit for each signal: as float64 exact to 65,536 ranks.
DIGIT = 2**16


class Stopped(BaseException):
    """The job was asked to stop, and does. Not an Exception: no program's except clause is meant for it."""

    def __init__(self, number: int, said: str = "") -> None:
        super().__init__(said)
        self.exit_code, self.said = 128 + number, said


class Wish:
    """What this rank was asked for."""

    def __init__(self) -> None:
        self.number, self.saves = 0, False  # the signal that came in; whether there are updates to save

    def listen(self) -> None:
        """Take signals from here on. A rank calls this when its framework has taken over what it takes over."""
        if threading.current_thread() is threading.main_thread():  # the one in which handlers run
            for number in WISHES:
                signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number or not self.saves:
            raise Stopped(number)
        self.number = number

    def as_number(self) -> float:
        """For the sum over ranks."""
        return float(DIGIT ** WISHES.index(signal.Signals(self.number))) if self.number else 0.0


def heard(total: float) -> int:
    """The signal that any rank wishes to stop for, of the sum of all ranks' numbers; 0 for none."""
    digits = [int(total) // DIGIT**i % DIGIT for i in range(len(WISHES))]
    return next((number for number, wishes in zip(WISHES, digits) if wishes), 0)
