"""``--visualdl DIR``: the run's scalars for VisualDL, written by rank 0."""

from __future__ import annotations

import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

from samestep import UserError
from samestep.checkpoint import write_atomic

NOTE = "visualdl-file"  # in the run dir: the name of its file
TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy_top1",
    "samples_per_second": "train/samples_per_second",
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy_top1",
    "test_accuracy_top2": "test/accuracy_top2",
}


def check_folder(folder: Path, run_dir: Path) -> None:
    """Raises UserError where ``folder``, which is made, cannot be written, or holds another run's file.

    Of several files in one folder VisualDL shows one. None is made here, as it would be in the way of the next start if
    this one failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        own = file_name(run_dir) if (run_dir / NOTE).exists() else None
        others = sorted(path.name for path in folder.glob("*vdlrecords*") if path.name != own)
    except OSError as problem:
        raise UserError(f"cannot write --visualdl {folder}: {problem.strerror}") from problem
    if others:
        raise UserError(
            f"--visualdl {folder} holds {others[0]}, of another run, and VisualDL shows one of a folder: "
            f"name a folder for each run, such as {folder / run_dir.name}, or remove that file if it is not needed"
        )


def file_name(run_dir: Path) -> str:
    """The run's file in any folder. The run dir, which must exist, keeps it, and so it may be moved."""
    note = run_dir / NOTE
    if not note.exists():
        write_atomic(note, f"vdlrecords.{secrets.token_hex(6)}.log\n".encode())  # VisualDL reads names that begin so
    return note.read_text().strip()


class Scalars:
    """Writes what metrics.jsonl gets, from its first line on: after a resume, each step is there once."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        """Raises UserError as `check_folder` does; no file but the run's own is touched."""
        check_folder(folder, run_dir)
        from visualdl import LogWriter  # which takes a second to import, and only this option needs

        name = file_name(run_dir)
        (folder / name).unlink(missing_ok=True)  # its lines are those of an earlier start
        self._writer = LogWriter(logdir=str(folder), file_name=name)
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
