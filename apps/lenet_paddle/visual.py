"""``--visualdl DIR``: the run's scalars for VisualDL, written by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep import UserError

FILE = "vdlrecords.samestep.log"  # VisualDL shows files whose name begins so
TAGS = {
    "loss": "train/loss",
    "samples_per_second": "train/samples_per_second",
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy_top1",
    "test_accuracy_top2": "test/accuracy_top2",
}


class Scalars:
    """Writes what metrics.jsonl gets, from its first line on: after a resume, each step is there once."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).unlink(missing_ok=True)
        except OSError as problem:
            raise UserError(f"cannot write --visualdl {folder}: {problem.strerror}") from problem
        from visualdl import LogWriter  # which takes a second to import, and only this option needs

        self._writer = LogWriter(logdir=str(folder), file_name=FILE)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            if "step" in values:
                self.write(values)

    def write(self, values: dict[str, Any]) -> None:
        for name, tag in TAGS.items():
            if name in values:
                self._writer.add_scalar(tag, values[name], values["step"])

    def close(self) -> None:
        """Write out what is held in memory; nothing is run at exit."""
        self._writer.close()
