"""Write metrics.jsonl and the result. Only rank 0 imports this module."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep import NonRetryableError, checkpoint, log, untrusted
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.options import Options, as_json, own_scalar
from samestep.root import Root
from samestep.step_losses import StepLosses
from samestep.trace import TraceFile


class Metrics:
    """Append JSON objects to ``metrics.jsonl``, one per line after a header line.

    Opening the file deletes the lines after step ``resumed_from``, so that each step appears once.

    Attributes:
        losses: the file ``log/losses.bin``, which has the loss of every step.
        trace: the file ``log/trace.jsonl``.
    """

    def __init__(self, run_dir: Path, header: Mapping[str, Any], resumed_from: int | None) -> None:
        self._path = run_dir / "metrics.jsonl"
        with checkpoint.writing(self._path):
            first_line = dict(header)
            lines: list[bytes] = []
            if resumed_from is not None:
                lines = self._lines_before(resumed_from)
            if lines:
                first_line = {"resumed": {"step": resumed_from, **header}}
            lines.append(json.dumps(first_line).encode())
            checkpoint.write_atomic(self._path, b"\n".join(lines) + b"\n")
            file = Root(run_dir).open(self._path.name, os.O_WRONLY | os.O_APPEND)
            self._file = os.fdopen(file, "a", buffering=1)
            kept_until = resumed_from if lines else None
            self.losses = StepLosses(run_dir, kept_until)
            self.trace = TraceFile(run_dir, kept_until)
            is_durable = Root(run_dir).sync()
        if not is_durable:
            risk = "a crash of the machine can lose the newest checkpoints"
            log.warning(f"the file system of {run_dir} cannot sync folders: {risk}: copy important ones elsewhere")

    def _lines_before(self, resumed_from: int) -> list[bytes]:
        """Return the header and the lines up to step ``resumed_from``, without invalid lines."""
        lines: list[bytes] = []
        if not self._path.exists():
            return lines
        schema = {"step": untrusted.integer(0, resumed_from)}
        for line in untrusted.read_bytes(self._path).splitlines():
            if len(line) > untrusted.MAX_BYTES:
                continue
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # the line is invalid or truncated
                values = untrusted.parse_object(line)
                header = {"step": 0, **values}
                untrusted.check(values.get("resumed", header), schema)
                lines.append(line)
        return lines

    def write(self, **values: Any) -> None:
        """Append one line, and flush it to the file.

        Raises:
            NonRetryableError: the write fails, such as on a full disk.
        """
        with checkpoint.writing(self._path):
            self._file.write(encode(values) + "\n")

    def sync(self) -> None:
        """Sync the files to the disk. A checkpoint's thread calls this method before it writes the manifest."""
        os.fsync(self._file.fileno())
        self.losses.sync()
        self.trace.sync()


def encode(values: Mapping[str, Any]) -> str:
    """Return values as a JSON object. NaN and infinities become null, because JSON has no such numbers.

    Raises:
        NonRetryableError: a value is neither a JSON value nor a scalar of numpy or of a framework.
    """
    fields = []
    for name, value in values.items():
        try:
            fields.append(json.dumps({name: _plain(value)})[1:-1])
        except (TypeError, ValueError) as error:
            raise NonRetryableError(f"{name} cannot be stored as JSON ({error}): pass a number") from error
    return f"{{{', '.join(fields)}}}"


def _plain(value: Any) -> Any:
    """Return a value with Python's own numbers, and with None for NaN and infinities."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    value = own_scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def header(app: str, options: Options, world: World, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the first line of metrics.jsonl.

    Args:
        app: name of the app, such as "cifar_ddp".
        options: the run's parsed command-line options.
        world: rank, world size and launcher of this process.
        metadata: versions and settings that affect the run's numbers.
    """
    return {
        "app": app,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "host": socket.gethostname(),
        **metadata,
        "world": asdict(world),
        "options": as_json(options),
        "command": command(),
    }


def command() -> dict[str, Any]:
    """Return the program, arguments, folder and thread count of this process, for `samestep replay`."""
    folder = None
    with contextlib.suppress(OSError):  # the working directory was deleted
        folder = os.getcwd()
    return {
        "program": os.path.realpath(sys.argv[0]),
        "arguments": sys.argv[1:],
        "folder": folder,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def report(app: str, options: Options, world: World, values: Mapping[str, Any]) -> None:
    """Write and print the result. With --evaluate-only, write evaluation.json instead of result.json.

    Args:
        app: name of the app, such as "cifar_ddp".
        options: the run's parsed command-line options.
        world: rank, world size and launcher of this process.
        values: further fields of the result.

    Raises:
        NonRetryableError: the file cannot be written.
    """
    restarts = JobInfo.from_environ(os.environ).restarts + (world.restart_count or 0)
    fields = {
        "app": app,
        "launcher": world.launcher,
        "world_size": world.world_size,
        "node_count": world.node_count,
        "restarts": restarts,
    }
    for name in options.RESULT_FIELDS:
        fields[name] = vars(options)[name]
    fields.update(values)
    fields["run_dir"] = str(options.run_dir)
    text = encode(fields)
    name = "evaluation.json" if options.evaluate_only else "result.json"
    with checkpoint.writing(options.run_dir / name):
        checkpoint.write_atomic(options.run_dir / name, (text + "\n").encode())
    log.result(text)
