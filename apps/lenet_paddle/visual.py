"""``--visualdl DIR``: the run's scalars for VisualDL, written by rank 0."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from samestep import UserError

TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy_top1",
    "samples_per_second": "train/samples_per_second",
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy_top1",
    "test_accuracy_top2": "test/accuracy_top2",
}


def own_file(folder: Path, run_dir: Path) -> Path:
    """The run's file in ``folder``, which is made: under a name that no other run has, and the same run has again.

    Raises UserError where it cannot be written, or ``folder`` holds another's: VisualDL shows one file of a folder.
    """
    key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    file = folder / f"vdlrecords.{key}.log"  # VisualDL reads files whose name begins so
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(path.name for path in folder.glob("*vdlrecords*") if path != file)
        if others:
            raise UserError(
                f"--visualdl {folder} holds {others[0]}, of another run, and VisualDL shows one of a folder: "
                f"name a folder for each run, such as {folder / run_dir.name}"
            )
        file.touch()
    except OSError as problem:
        raise UserError(f"cannot write --visualdl {folder}: {problem.strerror}") from problem
    return file


class Scalars:
    """Writes what metrics.jsonl gets, from its first line on: after a resume, each step is there once."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        """Raises UserError as `own_file` does; no file but the run's own is touched."""
        file = own_file(folder, run_dir)
        from visualdl import LogWriter  # which takes a second to import, and only this option needs

        file.unlink()  # its lines are those of an earlier start
        self._writer = LogWriter(logdir=str(folder), file_name=file.name)
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
