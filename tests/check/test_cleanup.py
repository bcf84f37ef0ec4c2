"""Kill checks at random moments: no process of the script and no temporary file may be left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from amounts import amount
from test_command import MAIN, PLAIN, program

LIMIT = 60.0  # seconds
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
# A process that leaves the session of its job and ignores TERM.
DAEMON = """
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                 start_new_session=True)
"""


def stop_at_hangup() -> None:
    """Undo nohup, which a check respects."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def processes_of(temporary: Path) -> Iterator[int]:
    """Yield the PIDs of all processes with the path ``temporary`` in their environment or their command."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
                content = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
                if os.fsencode(temporary) in content:
                    yield int(folder.name)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_killed_check_leaves_nothing(tmp_path: Path, number: signal.Signals, soak: bool, table: list[str]) -> None:
    """Kill the check while a script without a framework runs; the script has a process in another session."""
    chance = random.Random(number)
    start = "def train() -> None:\n"
    folder = program(tmp_path / "sound", PLAIN, ((start, f"{DAEMON}\n\n{start}"),))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    rounds = amount(soak, few=1, many=50)
    command = [sys.executable, "-c", MAIN, "check", "--faults=rank-killed,save-killed", "--"]
    for round_number in range(rounds):
        check = subprocess.Popen(
            [*command, sys.executable, "plain.py", "-n", "2"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=stop_at_hangup,
        )
        time.sleep(chance.uniform(0.0, 6.0) if soak else 2.0)
        check.send_signal(number)
        check.wait(LIMIT)
        end = time.monotonic() + LIMIT
        while left := [*map(str, processes_of(temporary)), *map(str, temporary.iterdir())]:
            assert time.monotonic() < end, (round_number, left)
            time.sleep(0.05)
    assert [*folder.iterdir()] == [folder / "plain.py"]
    table.append(
        f"check: {number.name} to the check at a random moment; nothing is left | 2 | none | {rounds} | {rounds}"
    )
