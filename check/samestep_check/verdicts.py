"""The verdicts of a row other than passed."""

from __future__ import annotations

ADAPTER = "give an --adapter that records them"  # the remedy of several verdicts


class Verdict(Exception):
    """A row's result other than passed."""


class Failed(Verdict):
    """The script does not survive the fault, or behaves wrongly after it."""


class CannotTell(Verdict):
    """The runs of the script do not show whether the script passes the row."""


class OutOfTime(CannotTell):
    """The row needs more time than its limit."""

    def __init__(self) -> None:
        super().__init__("the time of the row is over: raise --row-limit")


class NotSeen(Verdict):
    """The check cannot observe in the script what the row needs."""
