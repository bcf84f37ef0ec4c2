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
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KILL_SECONDS = 10.0  # time limit for the end of all processes, in seconds
DELETE_SECONDS = 60.0  # time limit for the deletion of the folder, in seconds
DONE = b"\0done"  # the last bytes that a check writes if it has deleted its folder
EMPTY_ROUNDS = 3  # searches in a row that must find no process, because a process may be starting another


@contextmanager
def guarded_folder() -> Iterator[Path]:
    """Create a temporary folder, and delete it at the end of the block.

    If this process is killed in the block, another process kills the processes of the check's jobs, and deletes the
    folder. A job's environment has the folder's name as ``check`` in SAMESTEP_INSIDE.

    Yields:
        The folder's absolute path. Its name is unique.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-I", __file__]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=reader, stdout=null, stderr=null, start_new_session=True):
        os.close(reader)
        with open(writer, "wb", buffering=0) as pipe:
            with tempfile.TemporaryDirectory(prefix="samestep-check-") as temporary:
                folder = Path(temporary).resolve()
                pipe.write(os.fsencode(folder))
                yield folder
            pipe.write(DONE)  # not after an exception, which a signal may have raised while the folder was deleted


def main() -> None:
    """Wait until the check has ended or was killed. After a kill, end its jobs and delete its temporary folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.stdin.buffer.read()  # returns when the check has ended
    end = time.monotonic() + DELETE_SECONDS
    while folder and not folder.endswith(DONE) and os.path.exists(folder) and time.monotonic() < end:
        end_processes(b'"check": "%s"' % os.path.basename(folder))  # again, if a job's process has started late
        shutil.rmtree(folder, ignore_errors=True)


def end_processes(mark: bytes) -> None:
    """Kill all processes with ``mark`` in their environment, and all processes of their sessions."""
    sessions: set[int] = set()
    empty = 0
    end = time.monotonic() + KILL_SECONDS
    while empty < EMPTY_ROUNDS and time.monotonic() < end:
        found = find(mark, sessions)
        sessions.update(found.values())
        kill(found)
        empty = 0 if found else empty + 1
        time.sleep(0.05)


def find(mark: bytes, sessions: Container[int]) -> dict[int, int]:
    """Return the running processes that belong to a session, or have a mark in their environment.

    Args:
        mark: bytes that the environment contains.
        sessions: IDs of sessions.

    Returns:
        The session ID of each process, by PID.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            # The fields after the name in parentheses are state, parent, group and session.
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(session) in sessions or mark in (path / "environ").read_bytes()):
                found[int(path.name)] = int(session)
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes. Ignore processes that have ended or belong to another user."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
