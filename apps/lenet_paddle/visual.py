"""Write the run's scalars for VisualDL on rank 0 (``--visualdl DIR``)."""

from __future__ import annotations

import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

from samestep import ConfigError
from samestep.checkpoint import write_atomic

NOTE = "visualdl-file"  # file in the run dir that contains the name of the run's VisualDL file
TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy_top1",
    "accuracy_top2": "train/accuracy_top2",
    "samples_per_second": "train/samples_per_second",
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy_top1",
    "test_accuracy_top2": "test/accuracy_top2",
}


def check_folder(folder: Path, run_dir: Path) -> None:
    """Create ``folder``, and check that it is writable. Leave no file, because a file would block the next start.

    Raises:
        ConfigError: ``folder`` is not writable, or contains another run's file. VisualDL shows one file per folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        names = {path.name for path in folder.glob("*vdlrecords*")}
        if (run_dir / NOTE).exists():
            names.discard(file_name(run_dir))
        others = sorted(names)
    except OSError as error:
        raise ConfigError(f"cannot write --visualdl {folder}: {error.strerror}") from error
    if others:
        raise ConfigError(
            f"--visualdl {folder} holds {others[0]}, of another run, and VisualDL shows one of a folder: "
            f"name a folder for each run, such as {folder / run_dir.name}, or remove that file if it is not needed"
        )


def file_name(run_dir: Path) -> str:
    """Return the name of the run's VisualDL file. The run dir, which must exist, stores this name in NOTE."""
    note = run_dir / NOTE
    if not note.exists():
        write_atomic(note, f"vdlrecords.{secrets.token_hex(6)}.log\n".encode())  # VisualDL requires this prefix
    return note.read_text().strip()


class Scalars:
    """Write the numbers of metrics.jsonl to a VisualDL file. The file has each step once, even after a resume."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        """Replace the run's VisualDL file by a new file with the scalars of all lines of metrics.jsonl.

        Raises:
            ConfigError: `check_folder` rejects the folder.
        """
        check_folder(folder, run_dir)
        from visualdl import LogWriter  # only --visualdl needs this slow import

        name = file_name(run_dir)
        (folder / name).unlink(missing_ok=True)  # file of an earlier start
        self._writer = LogWriter(logdir=str(folder), file_name=name)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            self.write(json.loads(line))

    def write(self, values: dict[str, Any]) -> None:
        """Write the scalars of a line of metrics.jsonl. Lines without a step have no scalars."""
        for name, tag in TAGS.items():
            if name in values:
                self._writer.add_scalar(tag, values[name], values["step"])

    def close(self) -> None:
        """Write the buffered records to disk, because VisualDL does not write them at exit."""
        self._writer.close()
