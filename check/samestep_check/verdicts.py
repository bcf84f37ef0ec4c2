"""The verdicts of rows that do not pass."""

from __future__ import annotations

ADAPTER = "give an --adapter that records them"  # the remedy in messages of several verdicts


class Verdict(Exception):
    """The verdict of a row that does not pass."""


class Failed(Verdict):
    """The script fails the row. For example, it does not resume after the fault, or takes other steps at 1 rank."""


class CannotTell(Verdict):
    """The runs of the script do not show whether the script passes the row."""


class OutOfTime(CannotTell):
    """The row needs more time than its limit."""

    def __init__(self) -> None:
        super().__init__("the time of the row is over: raise --row-limit")


class NotSeen(Verdict):
    """The check cannot observe or change something that the row needs, such as a step or the number of ranks."""
