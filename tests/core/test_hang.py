"""A hang is explained: which rank holds the others up, and at which line of code. Real processes, each really stuck."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import CORE, LIMIT
from samestep import hang, log

HOST = socket.gethostname()
TIMEOUT = 4.0  # seconds without progress: longer than an interpreter must be held before a stack is written

# A rank of two. The guilty one is stuck in the function that is named; the other waits for it.
PROGRAM = """\
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from samestep import log, watchdog
from samestep.env import World

run_dir, rank, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def stopped():
    time.sleep(1.5) or os.kill(os.getpid(), signal.SIGSTOP)  # stuck: stopped

def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()  # stuck: lock

def loader():
    time.sleep(600)  # stuck: loader

def pipe():
    while True:
        log.info("x" * 1000)

def disk():
    os.mkfifo(run_dir / "metrics.jsonl")
    log.Metrics(run_dir, {}, 0)

def heartbeats():
    os.mkfifo(run_dir / "log" / f".alive-{rank}.{rank}.tmp")
    time.sleep(600)  # stuck: heartbeats

def loop():
    while True: pass  # stuck: loop

def interpreter():
    ctypes.PyDLL(None).sleep(600)  # stuck: interpreter

def wait():
    while True:
        time.sleep(
            0.1
        )  # ranks talk

log.start(run_dir, rank, False)
dog = watchdog.Watchdog(World(rank, 2, launcher="torchrun"), float(sys.argv[4]))
dog.write_to(run_dir / "log")
while not (run_dir / "log" / f"alive-{1 - rank}").exists():
    time.sleep(0.05)
for step in range(3):
    dog.beat(step + 1)
globals()[kind]()
"""
STREAM = next(i for i, line in enumerate(Path(log.__file__).read_text().splitlines(), 1) if "stream.write(" in line)
METRICS = next(i for i, line in enumerate(Path(log.__file__).read_text().splitlines(), 1) if "read_text(" in line)
PLACES = {"pipe": f"log.py:{STREAM} in _to_console", "disk": f"log.py:{METRICS} in _kept_lines"}
KINDS = ("stopped", "lock", "loader", "pipe", "disk", "heartbeats", "loop", "interpreter")


def place(kind: str) -> str:
    """Where a rank that is stuck stands, by the program's text."""
    lines = PROGRAM.splitlines()
    found = [i for i, line in enumerate(lines, 1) if line.endswith(f"# stuck: {kind}")]
    return PLACES.get(kind) or f"program.py:{found[0]} in {kind}"


@dataclass
class Hang:
    """How one hang ended."""

    run_dir: Path
    guilty: int
    pids: dict[int, int]
    lines: dict[int, str]  # what each rank has told on its console

    @property
    def seconds(self) -> float:
        """From the last progress until the line was told, of the rank that told it."""
        stalled = hang.read_json(self.run_dir / "log" / "stalled")
        its = hang.read_json(self.run_dir / "log" / f"hang-{stalled['rank']}.json")
        return float(stalled["time"] - its["time"] + its["waited"])


class Ranks:
    """The two ranks of a hang; none is left when the test ends."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.run_dir, self.guilty, self.kind = folder, 0 if kind == "pipe" else 1, kind
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(PROGRAM)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
        self.processes = {
            rank: subprocess.Popen(
                [sys.executable, program, folder, str(rank), kind if rank == self.guilty else "wait", str(TIMEOUT)],
                env={**environ, "PYTHONPATH": CORE, "SAMESTEP_JOB": f"job-{kind}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # which nobody reads
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        }

    def ended(self) -> Hang:
        """Wait until the ranks that can end have done so: one that is stopped, or whose interpreter is held, cannot."""
        lines = {}
        pids = {rank: process.pid for rank, process in self.processes.items()}
        for rank, process in sorted(self.processes.items(), key=lambda item: item[0] == self.guilty):
            if rank == self.guilty and self.kind in ("stopped", "interpreter"):
                process.kill()
            assert process.stderr
            lines[rank] = process.stderr.read()
            process.wait(timeout=LIMIT)
        return Hang(self.run_dir, self.guilty, pids, lines)

    def clean_up(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate(timeout=LIMIT)


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Hang]]:
    """All at once: they cost little but time."""
    folder = tmp_path_factory.mktemp("hangs")
    started = {kind: Ranks(folder / kind, kind) for kind in KINDS}
    try:
        yield {kind: ranks.ended() for kind, ranks in started.items()}
    finally:
        for ranks in started.values():
            ranks.clean_up()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_is_told_with_the_rank_and_its_line(hangs: dict[str, Hang], kind: str) -> None:
    found = hangs[kind]
    other = 1 - found.guilty
    told = found.lines[other]
    print(f"{kind}: told {found.seconds - TIMEOUT:.2f} s over --timeout: {told}")  # measured, and shown by -rP
    (line,) = told.splitlines()
    assert line.startswith(f"error: no progress for 4 s: rank {found.guilty} ({HOST}, pid {found.pids[found.guilty]})")
    assert f" at {place(kind)}" in line
    assert re.search(rf"; rank {other} \({HOST}, pid {found.pids[other]}\) (waits|last seen) at program.py:", line)
    words = {"stopped": f"stopped by a signal (kill -CONT {found.pids[1]} ", "interpreter": "held by C code"}
    if kind in words:
        assert re.search(rf"last alive at step \d, silent for \d+ s, .*{re.escape(words[kind])}", line)
        assert (f", last seen at {place(kind)}" in line) == (kind == "stopped")
    elif kind != "heartbeats":
        assert " last alive at step 3" in line
        assert ", not in a collective; " in line
