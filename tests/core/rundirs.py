"""Run dirs as runs leave them: a toy's real `Run` in a process of its own, whole, killed and started again, stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import threads
from programs import CORE

LIMIT = 120  # seconds that no run of it needs
STEPS, EPOCH = 12, 4  # of the toy
KILLED, STOPPED = 9, 6  # steps at which a run is killed, or told to stop
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
        ranks[0].run.wish.number = signal.SIGTERM
    if (what, done) == ("not finite", 6):
        ranks[0].run.record(float("nan"), 0.0, {})

def main():
    threads.job(1, arguments, threads.Faults(after_update=after_update), ranks=ranks)
    if ranks[0].error:
        raise ranks[0].error

log.run(main)
"""


def start(run_dir: Path, what: str = "whole", *arguments: str) -> int:
    """One start of the toy, as its launch script makes it; returns the exit code."""
    threads.put(run_dir.parent / "data")
    (run_dir / "log").mkdir(parents=True, exist_ok=True)
    with (run_dir / "log" / "launcher.log").open("a") as log:
        log.write(f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} python train.py\n")
    given = [f"--run-dir={run_dir}", f"--data-dir={run_dir.parent / 'data'}", "--log-every=1", *arguments]
    path = os.pathsep.join([CORE, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, *given],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode


def make(folder: Path) -> dict[str, Path]:
    """Three runs: one that nothing happened to, one that was killed and started again, and one that was stopped."""
    found = {name: folder / name for name in ("whole", "killed", "stopped")}
    assert start(found["whole"]) == 0
    assert start(found["killed"], "killed") == 137
    assert start(found["killed"]) == 0
    assert start(found["stopped"], "stopped") == 143
    return found
