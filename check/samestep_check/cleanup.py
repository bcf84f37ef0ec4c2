"""Delete a check's temporary folder and end its jobs, even if the check is killed.

A check starts this file as a program in a session of its own. The program waits for the check's end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KILL_SECONDS = 10.0  # time limit for the end of all processes, in seconds
EMPTY_ROUNDS = 3  # searches in a row that must find no process, because a process may be starting another


@contextmanager
def folder_for(kept: Path | None) -> Iterator[Path]:
    """Create a temporary folder for a check's copies and output, and delete the folder at the end of the block.

    If the check is killed in the block, another process kills all processes of the check's jobs. It then deletes the
    temporary folder.

    Args:
        kept: folder to yield instead of the temporary folder; this function neither creates nor deletes it.

    Yields:
        The folder's absolute path.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-I", __file__]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=reader, stdout=null, stderr=null, start_new_session=True):
        os.close(reader)
        with open(writer, "wb", buffering=0) as pipe:
            with tempfile.TemporaryDirectory(prefix="samestep-check-") as temporary:
                folder = Path(kept or temporary).resolve()
                pipe.write(b"\0".join([os.fsencode(folder), os.fsencode(temporary)]))
                yield folder
            pipe.write(b"\0done")


def main() -> None:
    """Wait until the check has ended or was killed. After a kill, end its jobs and delete its temporary folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, *rest = sys.stdin.buffer.read().split(b"\0")  # read() returns when the check has ended
    if len(rest) == 1:  # without "done"
        end_processes(folder)
        shutil.rmtree(rest[0], ignore_errors=True)


def end_processes(folder: bytes) -> None:
    """Kill the processes with a folder's path in their environment, and all processes in the sessions of these."""
    sessions: set[int] = set()
    empty = 0
    end = time.monotonic() + KILL_SECONDS
    while empty < EMPTY_ROUNDS and time.monotonic() < end:
        found = _processes(folder, sessions)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        empty = 0 if found else empty + 1
        time.sleep(0.05)


def _processes(folder: bytes, sessions: set[int]) -> list[int]:
    """Return the PIDs of the processes to kill, and add their sessions to ``sessions``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            # The fields after the name in parentheses are state, parent, group and session.
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(session) in sessions or folder in (path / "environ").read_bytes()):
                sessions.add(int(session))
                found.append(int(path.name))
    return found


if __name__ == "__main__":
    main()
