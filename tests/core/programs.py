"""Run programs that import samestep as child processes, and read the programs' output and run dirs."""

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
LIMIT = 30  # seconds; every child process ends sooner

PRELUDE = """
import os, sys, time
from pathlib import Path
from samestep import ConfigError, NonRetryableError, RemoteRankError, log, rundir
from samestep.metrics import Metrics

run_dir = Path(sys.argv[1])
"""


def default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore SIGINT


def environment() -> dict[str, str]:
    """Return this process's environment without PYTHONUNBUFFERED, and with the folder of core as PYTHONPATH."""
    return {**{name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}, "PYTHONPATH": CORE}


def start(
    code: str,
    run_dir: Path,
    *arguments: str,
    stdin: int | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start PRELUDE and ``code`` as a program in a child process."""
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
    """Run PRELUDE and ``code`` as a program in a child process until it ends."""
    with start(code, run_dir, stdout=stdout, stderr=stderr) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rank_log(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "log" / f"rank-{rank}.log").read_text()


def verdict(run_dir: Path) -> Any:
    """Return ``{"code": exit code}`` from the file ``log/no-restart`` of a rank, or None if the file is missing."""
    path = run_dir / "log" / "no-restart"
    if path.exists():
        return {"code": json.loads(path.read_text())["code"]}
    return None


@contextlib.contextmanager
def running(code: str, run_dir: Path, *arguments: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in the background until the block ends.

    Yields: the process, after it has printed ``until``.
    """
    with start(code, run_dir, *arguments, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LIMIT)[0], f"no {until!r} in time"
            assert process.stdout.readline().strip() == until
            yield process
        finally:
            process.kill()


# HOLD locks one byte of a run dir's lock file until its stdin closes. TRY waits some seconds for another lock.
HOLD = "rundir.Lock(run_dir, 'the first job').acquire(rundir.{})\nprint('held', flush=True)\nsys.stdin.read()\n"
TRY = """
def main():
    rundir.Lock(run_dir, "the second job").acquire(rundir.{}, wait={})
    print("got it")
log.run(main)
"""
