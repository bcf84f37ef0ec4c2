"""A run for W&B: ``RUN_DIR/track/wandb/offline-run-<time>-<id>/run-<id>.wandb``, which `wandb sync` uploads.

It is written here and not by ``wandb.init(mode="offline")``, which cannot go on in a file (wandb#4624): each start
would make another run. The records are W&B's own protocol buffers.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as records

from samestep.track import Line, News, WholeFile

# The file's format, a log of LevelDB's with a header: blocks in which each piece of a record has its CRC-32, its length
# and its kind.
BLOCK, HEADER = 32768, struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
PIECE = struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Wandb(WholeFile):
    """One offline run, whose id follows from the first line of metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "track" / "wandb")
        self._name = run_dir.name
        self._at, self._number, self._begun, self._last = 0, 0, 0.0, 0.0

    def place(self, news: News) -> Path:
        when = str(news.header.get("time", "")).translate({ord(each): None for each in "-:Z"}).replace("T", "_")
        return self._folder / f"offline-run-{when}-{news.key}" / f"run-{news.key}.wandb"

    def sweep(self, place: Path) -> None:
        for folder in self._folder.glob("offline-run-*"):
            if folder != place.parent:
                shutil.rmtree(folder)

    def head(self, news: News) -> bytes:
        self._at, self._number = len(HEADER), 0
        self._begun = self._last = news.lines[0].time if news.lines else time.time()
        header = records.HeaderRecord()
        header.version_info.producer, header.version_info.min_consumer = wandb.__version__, "0.70.0"
        run = records.RunRecord(
            run_id=news.key,
            project=str(news.header.get("app", "samestep")),
            display_name=self._name,
            host=str(news.header.get("host", "")),
        )
        run.start_time.FromNanoseconds(int(self._begun * 1e9))
        run.telemetry.python_version, run.telemetry.cli_version = sys.version.split()[0], wandb.__version__
        for name, value in {"_wandb": {}, **news.header}.items():
            run.config.update.add(key=name, value_json=json.dumps(value))
        return HEADER + self._records([records.Record(header=header), records.Record(run=run)])

    def body(self, lines: Sequence[Line]) -> bytes:
        self._last = lines[-1].time
        made = []
        for line in lines:
            history = records.HistoryRecord(step=records.HistoryStep(num=line.step))
            for name, value in self._values(line).items():
                history.item.add(nested_key=[name], value_json=json.dumps(value))
            made.append(records.Record(history=history))
        return self._records([*made, self._summary({**self._values(lines[-1])})])

    def _values(self, line: Line) -> dict[str, float]:
        its = {"_step": line.step, "_timestamp": line.time, "_runtime": line.time - self._begun}
        return {**line.values, **its}

    def end(self, result: dict[str, Any] | None) -> None:
        if result:
            end = records.Record(exit=records.RunExitRecord(exit_code=0, runtime=int(self._last - self._begun)))
            self.write(self._records([self._summary(result), end]))
        super().end(result)

    def _summary(self, values: dict[str, Any]) -> records.Record:
        summary = records.SummaryRecord()
        for name, value in values.items():
            summary.update.add(nested_key=[name], value_json=json.dumps(value))
        return records.Record(summary=summary)

    def _records(self, made: Sequence[records.Record]) -> bytes:
        content = bytearray()
        for record in made:
            self._number += 1
            record.num = self._number
            self._append(content, record.SerializeToString())
        return bytes(content)

    def _append(self, content: bytearray, record: bytes) -> None:
        begins = True
        while True:
            left = BLOCK - self._at % BLOCK
            if left < PIECE.size:  # no piece begins in so few bytes
                content += bytes(left)
                self._at += left
                left = BLOCK
            piece, record = record[: left - PIECE.size], record[left - PIECE.size :]
            kind = (FIRST if record else WHOLE) if begins else (MIDDLE if record else LAST)
            content += PIECE.pack(zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
            self._at += PIECE.size + len(piece)
            begins = False
            if not record:
                return
