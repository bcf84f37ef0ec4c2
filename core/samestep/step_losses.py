"""Write and read ``log/losses.bin``: the loss of every step, including steps without a line in metrics.jsonl.

A record has 16 bytes: the step (int64, updates done) and the loss (float64), both little-endian. The loss is the mean
over the step's global batch, computed before the update, with the same bits as ``loss`` in metrics.jsonl. Only rank 0
writes the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep import checkpoint, untrusted
from samestep.root import Root, write_all

NAME = "log/losses.bin"  # path in a run dir
RECORD = np.dtype([("step", "<i8"), ("loss", "<f8")])


class StepLosses:
    """Append to ``log/losses.bin``.

    Opening the file deletes the records after step ``resumed_from``, so that each step appears once.
    """

    def __init__(self, run_dir: Path, resumed_from: int | None) -> None:
        """Open the file of a run.

        Args:
            run_dir: folder of the run.
            resumed_from: last step to keep; None for a new run.

        Raises:
            NonRetryableError: the file cannot be written.
        """
        self._path = run_dir / NAME
        with checkpoint.writing(self._path):
            Root(run_dir).make_folder("log")
            self._file = Root(run_dir).append(NAME)
            size = count_until(read(run_dir), resumed_from or 0) * RECORD.itemsize
            self._file.truncate(size)

    def write(self, records: Iterable[tuple[int, float]]) -> None:
        """Append records (step, loss), in the order of steps.

        Raises:
            NonRetryableError: the write fails, such as on a full disk.
        """
        content = np.array(list(records), RECORD).tobytes()
        with checkpoint.writing(self._path):
            write_all(self._file.fileno(), content)

    def sync(self) -> None:
        """Sync the file to the disk.

        Call this method before each checkpoint, so that the records up to the checkpoint survive a crash of the
        machine.
        """
        os.fsync(self._file.fileno())


def read(run_dir: Path) -> NDArray[np.void]:
    """Return the records of a run, [m] of dtype RECORD, in the order of the file; m is 0 if the file is missing.

    Omit a record that a crash has truncated.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        content = untrusted.read_bytes(run_dir / NAME)
    except FileNotFoundError:
        content = b""
    return np.frombuffer(content, RECORD, count=len(content) // RECORD.itemsize)


def count_until(records: NDArray[np.void], last_step: int) -> int:
    """Return the number of leading records whose steps increase and are at most ``last_step``."""
    steps = records["step"]
    before = np.concatenate([np.zeros(1, np.int64), steps[:-1]])
    is_good = (steps > before[: len(steps)]) & (steps <= last_step)
    if is_good.all():
        return len(steps)
    return int(np.argmin(is_good))
