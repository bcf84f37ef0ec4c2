"""Write a run for TensorBoard, as the event file ``RUN_DIR/track/tensorboard/events.out.tfevents.<number>``."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from samestep_observe.tracker import AtomicFileTracker, Line, MetricsBatch

FILE_NAME = re.compile(r"events\.out\.tfevents\.\d{1,18}")


class TensorBoard(AtomicFileTracker):
    """A tracker that writes one event file.

    A file that replaces another file has the next number. The new file begins with a session start at step 0, at which
    an open TensorBoard discards earlier data. The replaced file is emptied, not deleted, because an open TensorBoard
    reads the file before the next file.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, folder="track/tensorboard")
        self._time = 0.0
        self._step = 0

    def _files(self) -> list[str]:
        return sorted(name for name in self._root.names(self._folder) if FILE_NAME.fullmatch(name))

    def final_name(self, batch: MetricsBatch) -> str:
        """Return a file name with the next number."""
        numbers = [int(name.rpartition(".")[2]) for name in self._files()]
        return f"events.out.tfevents.{max(numbers, default=0) + 1:010d}"

    def delete_stale(self, name: str) -> None:
        """Empty the newest of the other event files, and delete the rest."""
        others = [each for each in self._files() if each != name]
        for each in others[:-1]:
            self._root.unlink(f"{self._folder}/{each}")
        for each in others[-1:]:
            file = self._root.open(f"{self._folder}/{each}", os.O_WRONLY)
            os.truncate(file, 0)
            os.close(file)

    def head(self, batch: MetricsBatch) -> bytes:
        """Return events with the file's version, a session start, and the header as text."""
        self._time = batch.lines[0].time if batch.lines else 0.0
        version = Event(wall_time=self._time, file_version="brain.Event:2")
        start = Event(wall_time=self._time, step=0, session_log=SessionLog(status=SessionLog.START))
        return _records([version, start, self._text("header", batch.header)])

    def body(self, lines: Sequence[Line]) -> bytes:
        """Return one event for each line."""
        self._step = lines[-1].step
        self._time = lines[-1].time
        events = []
        for line in lines:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
            events.append(Event(wall_time=line.time, step=line.step, summary=Summary(value=values)))
        return _records(events)

    def tail(self, result: dict[str, Any]) -> bytes:
        """Return an event with the result as text."""
        return _records([self._text("result", result)])

    def _text(self, tag: str, values: dict[str, Any]) -> Event:
        """Return an event with JSON for TensorBoard's Text plugin, indented as a code block of Markdown."""
        text = "\n".join(f"    {line}" for line in json.dumps(values, indent=2).splitlines())
        metadata = create_summary_metadata(tag, "")
        tensor = make_tensor_proto([text])
        summary = Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
        return Event(wall_time=self._time, step=self._step, summary=summary)


def _records(events: Sequence[Event]) -> bytes:
    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in events:
        writer.write(event.SerializeToString())
    return content.getvalue()
