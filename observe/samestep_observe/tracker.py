"""Define the interface of a tracker of `track`, its data, and the base of trackers that write a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from samestep.root import Root


class Line(NamedTuple):
    """A step's line of metrics.jsonl."""

    step: int  # updates done
    time: float  # when it was written, in seconds since 1970; computed from the file's content alone
    values: dict[str, float]


class MetricsBatch(NamedTuple):
    """Lines of metrics.jsonl. If ``is_new_file``, a resume replaced the file, and earlier batches no longer count."""

    is_new_file: bool
    header: dict[str, Any]  # the file's first line
    key: str  # 16 hexadecimal digits of that line, which identify the run
    lines: list[Line]
    has_more: bool  # more lines can be read at once
    committed_step: int = 0  # no resume takes back a step up to this one; read before the lines


class Tracker(Protocol):
    """A tracker of one run; its class takes the run dir. After any exception `track` makes a new one."""

    def add(self, batch: MetricsBatch) -> None:
        """Write one batch of log lines to the tracker. Called every second, also with an empty batch."""

    def finish(self, result: dict[str, Any] | None) -> None:
        """Finish for now; ``result`` is the run's, or None if the run did not finish."""


class AtomicFileTracker:
    """A tracker that is a file: written completely under another name, renamed, and then appended to.

    This replaces a file that a killed process left incomplete, or that a resume has cut back.
    """

    def __init__(self, run_dir: Path, folder: str) -> None:
        """Take the run dir, and the tracker's folder in it."""
        self._root = Root(run_dir)
        self._folder = folder
        self._root.make_folder(folder)
        self._file: IO[bytes] | None = None
        self._final_name: str | None = None  # None: the file is there already

    def final_name(self, batch: MetricsBatch) -> str:
        """Return the name of a new file in the tracker's folder."""
        raise NotImplementedError

    def delete_stale(self, name: str) -> None:
        """Delete the tracker's files except ``name``."""
        raise NotImplementedError

    def head(self, batch: MetricsBatch) -> bytes:
        """Return the beginning of a new file."""
        raise NotImplementedError

    def body(self, lines: Sequence[Line]) -> bytes:
        """Return the bytes to append for one or more lines."""
        raise NotImplementedError

    def tail(self, result: dict[str, Any]) -> bytes:
        """Return the bytes to append for the run's result."""
        raise NotImplementedError

    def add(self, batch: MetricsBatch) -> None:
        """Append the lines to the file, which is replaced if the batch is of a new file."""
        temporary = f"{self._folder}/.new"
        if batch.is_new_file:
            if self._file:
                self._file.close()
            self._file = self._root.create(temporary)
            self._final_name = self.final_name(batch)
            self._file.write(self.head(batch))
        if self._file is None:
            return
        if batch.lines:
            self._file.write(self.body(batch.lines))
        self._file.flush()
        if self._final_name and not batch.has_more:
            self._root.make_folder(os.path.dirname(f"{self._folder}/{self._final_name}"))
            self._root.rename(temporary, f"{self._folder}/{self._final_name}")
            self.delete_stale(self._final_name)
            self._final_name = None

    def finish(self, result: dict[str, Any] | None) -> None:
        """Append the result."""
        if self._file and result:
            self._file.write(self.tail(result))
            self._file.flush()


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one: ``{"options": {"lr": 1}}`` as ``{"options.lr": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
