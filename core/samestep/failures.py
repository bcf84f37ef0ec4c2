"""Record why a start of a job failed, so that the launch script detects whether the next start fails in the same way.

The file ``log/failure`` holds the exception of the first rank that failed. A rank that lost its connection to another
rank records no exception, because its failure follows from another failure. This module uses the standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from samestep.untrusted import check, integer, read_object, shown, text, write_json

FILE_NAME = "failure"  # name of the file in the log folder
MAX_TEXT = 1000  # maximum number of characters of each text
# Regular expression for the errors of gloo, NCCL and Horovod in ranks that lost the connection to another rank.
LOST_CONNECTION = r"connection (was )?(closed|reset)|broken pipe|remote process|has been shut down"
# Regular expression for the parts of a message that differ between two starts with the same failure.
_CHANGING = re.compile(r"0x[0-9a-f]+|\bpid \d+|\bport \d+|:\d{2,5}\b", re.IGNORECASE)
_SCHEMA = {"step": integer(0, 2**63), "error": text(MAX_TEXT), "text": text(MAX_TEXT)}


class Failure(NamedTuple):
    """The failure of a rank.

    Attributes:
        step: number of updates done.
        error: name of the exception's class, such as "ValueError".
        text: one line, such as "rank 0: ValueError: sample 7 is damaged".
    """

    step: int
    error: str
    text: str

    def is_same(self, other: Failure | None) -> bool:
        """Return whether both failures have the same step, error and text, except for ranks, addresses, ports, pids."""
        return other is not None and self._constant == other._constant

    @property
    def _constant(self) -> tuple[int, str, str]:
        return self.step, self.error, re.sub(r"\brank \d+", "", _CHANGING.sub("", self.text))


def is_lost_connection(problem: BaseException) -> bool:
    """Return whether the message of an exception reports a lost connection to another rank."""
    return re.search(LOST_CONNECTION, str(problem), re.IGNORECASE) is not None


def record(folder: Path, job: str, rank: int, step: int, problem: BaseException, line: str) -> None:
    """Record a failure if it is the first of this start, and not the effect of a lost connection to another rank.

    Args:
        folder: the run dir's ``log`` folder.
        job: the name of this start of the job.
        rank: rank of this process.
        step: number of updates done.
        problem: the exception that ended this rank.
        line: one line that describes the exception.
    """
    is_first = read_object(folder / FILE_NAME).get("job") != job
    if is_first and not is_lost_connection(problem):
        values = {"job": job, "step": step, "error": type(problem).__name__, "text": line[:MAX_TEXT]}
        write_json(folder, FILE_NAME, values, rank)


def read(folder: Path, job: str) -> Failure | None:
    """Return the recorded failure of the start ``job``; None if no rank has recorded one, or the file is damaged."""
    values = read_object(folder / FILE_NAME)
    try:
        check(values, {**_SCHEMA, "job": text(MAX_TEXT)})
    except ValueError:
        return None
    failure = Failure(values["step"], values["error"], shown(values["text"], MAX_TEXT))
    if values["job"] != job:
        return None
    return failure
