"""Write ``RUN_DIR/track/wandb/offline-run-<time>-<id>/run-<id>.wandb``, a run that `wandb sync` uploads to W&B.

``wandb.init(mode="offline")`` cannot continue a file (wandb#4624): each start would create another run. So this module
writes the file itself, with W&B's protocol buffers.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as records

from samestep_observe.tracker import AtomicFileTracker, Line, MetricsBatch

# The format is a file header, followed by LevelDB's log. Each block contains chunks of records. Each chunk begins with
# its CRC-32, length and type.
BLOCK = 32768
HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
MAX_TIME = 20  # maximum length of the time in a folder's name, in characters
CHUNK_HEADER = struct.Struct("<IHB")
FULL = 1
FIRST = 2
MIDDLE = 3
LAST = 4


class Wandb(AtomicFileTracker):
    """A tracker that writes one offline run, whose id is a hash of the first line of metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, folder="track/wandb")
        self._name = run_dir.name
        self._position = 0
        self._record_count = 0
        self._start = 0.0
        self._last = 0.0

    def final_name(self, batch: MetricsBatch) -> str:
        """Return the path, in the tracker's folder, that `wandb sync` expects."""
        text = str(batch.header.get("time", "")).replace("T", "_")
        when = re.sub(r"[^0-9_]", "", text)[:MAX_TIME]
        return f"offline-run-{when}-{batch.key}/run-{batch.key}.wandb"

    def delete_stale(self, name: str) -> None:
        """Delete the folders of other runs."""
        for folder in self._root.names(self._folder):
            if folder.startswith("offline-run-") and folder != name.partition("/")[0]:
                self._root.delete(f"{self._folder}/{folder}")

    def head(self, batch: MetricsBatch) -> bytes:
        """Return the file header, and the records of the versions and of the run with its config."""
        self._position = len(HEADER)
        self._record_count = 0
        self._start = batch.lines[0].time if batch.lines else time.time()
        self._last = self._start
        header = records.HeaderRecord()
        header.version_info.producer = wandb.__version__
        header.version_info.min_consumer = "0.70.0"
        app = str(batch.header.get("app", "samestep"))
        host = str(batch.header.get("host", ""))
        run = records.RunRecord(run_id=batch.key, project=app, display_name=self._name, host=host)
        run.start_time.FromNanoseconds(int(self._start * 1e9))
        run.telemetry.python_version = sys.version.split()[0]
        run.telemetry.cli_version = wandb.__version__
        for name, value in {"_wandb": {}, **batch.header}.items():
            run.config.update.add(key=name, value_json=json.dumps(value))
        return HEADER + self._log([records.Record(header=header), records.Record(run=run)])

    def body(self, lines: Sequence[Line]) -> bytes:
        """Return a history record for each line, and a summary record of the last line."""
        self._last = lines[-1].time
        steps = []
        for line in lines:
            history = records.HistoryRecord(step=records.HistoryStep(num=line.step))
            _add_values(history.item, self._values(line))
            steps.append(records.Record(history=history))
        return self._log([*steps, _summary(self._values(lines[-1]))])

    def tail(self, result: dict[str, Any]) -> bytes:
        """Return the summary record of the result, and the exit record of the run."""
        end = records.RunExitRecord(exit_code=0, runtime=int(self._last - self._start))
        return self._log([_summary(result), records.Record(exit=end)])

    def _values(self, line: Line) -> dict[str, float]:
        return {**line.values, "_step": line.step, "_timestamp": line.time, "_runtime": line.time - self._start}

    def _log(self, new: Sequence[records.Record]) -> bytes:
        content = bytearray()
        for record in new:
            self._record_count += 1
            record.num = self._record_count
            self._append(content, record.SerializeToString())
        return bytes(content)

    def _append(self, content: bytearray, record: bytes) -> None:
        is_first = True
        while is_first or record:
            room = BLOCK - self._position % BLOCK
            if room < CHUNK_HEADER.size:  # too few bytes for a chunk's header
                content += bytes(room)
                self._position += room
                room = BLOCK
            chunk = record[: room - CHUNK_HEADER.size]
            record = record[room - CHUNK_HEADER.size :]
            kind = _chunk_kind(is_first, is_last=not record)
            content += CHUNK_HEADER.pack(zlib.crc32(chunk, zlib.crc32(bytes([kind]))), len(chunk), kind) + chunk
            self._position += CHUNK_HEADER.size + len(chunk)
            is_first = False


def _chunk_kind(is_first: bool, is_last: bool) -> int:
    if is_first:
        return FULL if is_last else FIRST
    return LAST if is_last else MIDDLE


def _summary(values: Mapping[str, Any]) -> records.Record:
    summary = records.SummaryRecord()
    _add_values(summary.update, values)
    return records.Record(summary=summary)


def _add_values(items: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        items.add(nested_key=[name], value_json=json.dumps(value))
