"""Make run dirs of a toy's real `Run` in child processes: uninterrupted, killed and restarted, or stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import threads
from programs import CORE

LIMIT = 120  # seconds; every run ends sooner
STEPS = 12
EPOCH = 4  # steps per epoch of the toy
KILLED = 9
STOPPED = 6  # the steps of the kill and of the stop
PROGRAM = """
import os, signal, sys
from pathlib import Path
import threads
from samestep import checkpoint, log

what, *arguments = sys.argv[1:]
ranks = []

def after_update(rank, done, model):
    if (what, done) == ("killed", 9):
        checkpoint.finish()
        os._exit(137)
    if (what, done) == ("stopped", 6):
        ranks[0].run.stop_request.number = signal.SIGTERM

def main():
    threads.job(1, arguments, threads.Faults(after_update=after_update), ranks=ranks)
    if ranks[0].error:
        raise ranks[0].error

log.run(main)
"""


def start(run_dir: Path, what: str = "whole", *arguments: str) -> int:
    """Start the toy once, as its launch script would; return the exit code."""
    threads.put(run_dir.parent / "data")
    (run_dir / "log").mkdir(parents=True, exist_ok=True)
    with (run_dir / "log" / "launcher.log").open("a") as log:
        log.write(f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} python train.py\n")
    given = [f"--run-dir={run_dir}", f"--data-dir={run_dir.parent / 'data'}", "--log-every=1", *arguments]
    path = os.pathsep.join([CORE, str(Path(threads.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, *given],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode


def make(folder: Path) -> dict[str, Path]:
    """Make three runs: an uninterrupted one, one that was killed and restarted, and one that was stopped."""
    run_dirs = {name: folder / name for name in ("whole", "killed", "stopped")}
    assert start(run_dirs["whole"]) == 0
    assert start(run_dirs["killed"], "killed") == 137
    assert start(run_dirs["killed"]) == 0
    assert start(run_dirs["stopped"], "stopped") == 143
    return run_dirs
