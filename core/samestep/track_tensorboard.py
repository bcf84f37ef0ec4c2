"""A run for TensorBoard: ``RUN_DIR/track/tensorboard/events.out.tfevents.<number>``, with its own protocol buffers."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from samestep.track import Line, News, WholeFile

NAME = re.compile(r"events\.out\.tfevents\.(\d+)")


class TensorBoard(WholeFile):
    """One event file.

    A file that replaces another has the next number, and begins with a start of session at step 0, at which an open
    TensorBoard drops what it has read. The one before stays, empty: it is looked for before the next is read.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "track" / "tensorboard")
        self._time, self._step = 0.0, 0

    def place(self, news: News) -> Path:
        numbers = [int(found[1]) for path in self._folder.iterdir() if (found := NAME.fullmatch(path.name))]
        return self._folder / f"events.out.tfevents.{max(numbers, default=0) + 1:010d}"

    def sweep(self, place: Path) -> None:
        others = sorted(path for path in self._folder.iterdir() if NAME.fullmatch(path.name) and path != place)
        for path in others[:-1]:
            path.unlink()
        for path in others[-1:]:
            os.truncate(path, 0)

    def head(self, news: News) -> bytes:
        self._time = news.lines[0].time if news.lines else 0.0
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        return _records(
            [
                event_pb2.Event(wall_time=self._time, file_version="brain.Event:2"),
                event_pb2.Event(wall_time=self._time, step=0, session_log=start),
                self._text("header", news.header),
            ]
        )

    def body(self, lines: Sequence[Line]) -> bytes:
        self._step, self._time = lines[-1].step, lines[-1].time
        events = []
        for line in lines:
            values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
            summary = summary_pb2.Summary(value=values)
            events.append(event_pb2.Event(wall_time=line.time, step=line.step, summary=summary))
        return _records(events)

    def end(self, result: dict[str, Any] | None) -> None:
        if result:
            self.write(_records([self._text("result", result)]))
        super().end(result)

    def _text(self, tag: str, values: dict[str, Any]) -> event_pb2.Event:
        """JSON as TensorBoard's Text shows it: in Markdown, where four spaces make a block of code."""
        text = "\n".join(f"    {line}" for line in json.dumps(values, indent=2).splitlines())
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING,
            tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]),
            string_val=[text.encode()],
        )
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        summary = summary_pb2.Summary(value=[value])
        return event_pb2.Event(wall_time=self._time, step=self._step, summary=summary)


def _records(events: Sequence[event_pb2.Event]) -> bytes:
    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in events:
        writer.write(event.SerializeToString())
    return content.getvalue()
