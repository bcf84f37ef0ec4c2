"""Run programs that use the package in their own processes; read their output and their run dirs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import samestep

CORE = str(Path(samestep.__file__).parents[1])
LIMIT = 30  # seconds that no child process needs

PRELUDE = """
import os, sys, time
from pathlib import Path
from samestep import ConfigError, NonRetryableError, RemoteRankError, log, rundir
from samestep.metrics import Metrics

run_dir = Path(sys.argv[1])
"""


def default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


def environment() -> dict[str, str]:
    """This process's environment without what would change how a program prints."""
    return {**{name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}, "PYTHONPATH": CORE}


def start(
    code: str,
    run_dir: Path,
    *arguments: str,
    stdin: int | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start a program that uses the package."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(run_dir), *arguments],
        env=environment(),
        text=True,
        preexec_fn=default_signals,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


def child(
    code: str, run_dir: Path, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run a program that uses the package, to its end."""
    with start(code, run_dir, stdout=stdout, stderr=stderr) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rank_log(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "log" / f"rank-{rank}.log").read_text()


def verdict(run_dir: Path) -> Any:
    """Return the final exit code that a rank left for the launch script, or None."""
    path = run_dir / "log" / "no-restart"
    if path.exists():
        return {"code": json.loads(path.read_text())["code"]}
    return None


@contextlib.contextmanager
def running(code: str, run_dir: Path, *arguments: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A program in the background that has printed ``until``; gone when the block ends."""
    with start(code, run_dir, *arguments, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LIMIT)[0], f"no {until!r} in time"
            assert process.stdout.readline().strip() == until
            yield process
        finally:
            process.kill()


# Holds a byte of a run dir's lock until its stdin ends, and tries to get one within some seconds.
HOLD = "rundir.Lock(run_dir, 'the first job').acquire(rundir.{})\nprint('held', flush=True)\nsys.stdin.read()\n"
TRY = """
def main():
    rundir.Lock(run_dir, "the second job").acquire(rundir.{}, wait={})
    print("got it")
log.run(main)
"""
