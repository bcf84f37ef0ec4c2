"""Define the interface and the data of the trackers of `track`, and a base class for trackers that write a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from samestep.root import Root


class Line(NamedTuple):
    """A line of metrics.jsonl about a step."""

    step: int  # number of completed updates
    time: float  # seconds since 1970 (UTC), computed from the content of metrics.jsonl
    values: dict[str, float]


class MetricsBatch(NamedTuple):
    """New lines of metrics.jsonl. If ``is_new_file``, the batch begins a new file that replaces all earlier batches."""

    is_new_file: bool
    header: dict[str, Any]  # the file's first line
    key: str  # first 16 hexadecimal digits of the header's SHA-256, which identify the run
    lines: list[Line]
    has_more: bool  # whether more lines can be read immediately
    committed_step: int = 0  # last step that no resume repeats


class Tracker(Protocol):
    """A tracker of one run, constructed from the run dir. After any exception, `track` constructs a new tracker."""

    def add(self, batch: MetricsBatch) -> None:
        """Write one batch to the tracker. `track` calls this method about every second, also without new lines."""

    def finish(self, result: dict[str, Any] | None) -> None:
        """Complete the tracker after the last line.

        Args:
            result: content of result.json; None for an unfinished run.
        """


class AtomicFileTracker:
    """A tracker that writes a file under a temporary name, renames the file, and then appends to it.

    The new file replaces a file that a killed process left incomplete, or whose last steps a resume repeats.
    """

    def __init__(self, run_dir: Path, folder: str) -> None:
        """Create the tracker's folder in the run dir."""
        self._root = Root(run_dir)
        self._folder = folder
        self._root.make_folder(folder)
        self._file: IO[bytes] | None = None
        self._final_name: str | None = None  # the name that the file will get; None after the renaming

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
        """Append the lines to the file; begin a new file if metrics.jsonl is new."""
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
        """Append the run's result, if there is one."""
        if self._file and result:
            self._file.write(self.tail(result))
            self._file.flush()


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts: ``{"options": {"lr": 1}}`` becomes ``{"options.lr": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
