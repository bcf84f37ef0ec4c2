"""What was measured, and when? metrics.jsonl and the result, by rank 0 alone: the others import none of this."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep import FatalError, checkpoint, log
from samestep.env import World
from samestep.options import Options, as_json


class Metrics:
    """``metrics.jsonl``, written by rank 0: a header line, then one JSON object a line.

    Opening it cuts it back to ``resumed_from`` updates, so that after any number of resumes each step is in it once.
    """

    def __init__(self, run_dir: Path, header: Mapping[str, Any], resumed_from: int | None) -> None:
        self._path = run_dir / "metrics.jsonl"
        kept = self._kept_lines(resumed_from) if resumed_from is not None else []
        if kept:
            kept.append(json.dumps({"resumed": {"step": resumed_from, **header}}))
        else:
            kept.append(json.dumps(dict(header)))
        checkpoint.write_atomic(self._path, ("\n".join(kept) + "\n").encode())
        self._file = self._path.open("a", buffering=1)

    def _kept_lines(self, resumed_from: int) -> list[str]:
        kept = []
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                values = json.loads(line)
            except ValueError:  # the line being written when the process was killed
                continue
            if not isinstance(values, dict):
                continue
            if values.get("step", 0) <= resumed_from and values.get("resumed", {}).get("step", 0) <= resumed_from:
                kept.append(line)
        return kept

    def write(self, **values: Any) -> None:
        """Append one line; it is in the file when this returns. Raises FatalError when the disk is full."""
        try:
            self._file.write(json.dumps(values) + "\n")
        except OSError as problem:
            raise FatalError(f"cannot write {self._path}: {problem.strerror}") from problem

    def sync(self) -> None:
        """Make the lines so far survive the machine's crash; before each checkpoint, which vouches for them."""
        os.fsync(self._file.fileno())


def header(app: str, options: Options, world: World, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The first line of metrics.jsonl; ``facts`` is what else made a run's numbers."""
    return {
        "app": app,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "host": socket.gethostname(),
        **facts,
        "world": asdict(world),
        "options": as_json(options),
    }


def report(app: str, options: Options, world: World, values: Mapping[str, Any]) -> None:
    """Write and print the result, ``values`` being the app's part; with --evaluate-only the run's own stays."""
    text = json.dumps(
        {
            "app": app,
            "launcher": world.launcher,
            "world_size": world.world_size,
            "node_count": world.node_count,
            "restarts": int(os.environ.get("SAMESTEP_RESTARTS", "0")) + (world.restart_count or 0),
            **{name: getattr(options, name) for name in options.REPORTED},
            **values,
            "run_dir": str(options.run_dir),
        }
    )
    name = "evaluation.json" if options.evaluate_only else "result.json"
    checkpoint.write_atomic(options.run_dir / name, (text + "\n").encode())
    log.result(text)
