"""The verdicts of rows that do not pass."""

from __future__ import annotations

ADAPTER = "give an --adapter that records them"  # the remedy in messages of several verdicts


class Verdict(Exception):
    """The verdict of a row that does not pass."""


class Failed(Verdict):
    """The script does not survive the fault, or behaves wrongly after the fault."""


class CannotTell(Verdict):
    """The runs of the script do not show whether the script passes the row."""


class OutOfTime(CannotTell):
    """The row needs more time than its limit."""

    def __init__(self) -> None:
        super().__init__("the time of the row is over: raise --row-limit")


class NotSeen(Verdict):
    """The check cannot observe an event or a value that the row needs, or cannot change the script as the row needs."""
