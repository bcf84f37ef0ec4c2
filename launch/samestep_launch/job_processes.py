"""Find, signal and reap all processes of one start of a job, including processes with a changed session or title.

This module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from samestep import ConfigError, env
from samestep.job_info import DOCUMENT, JobInfo, this_launcher

from samestep_launch.fork_server import IDLE

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
CLEAN_CHECKS = 2  # consecutive checks that must find no process, because a process may fork during a check


class Process(NamedTuple):
    """The id of a process's parent, and whether the process is a zombie (an ended process that was not reaped)."""

    parent: int
    is_zombie: bool


class JobProcesses:
    """The processes of one start of a job on this machine.

    A process belongs to the start if its environment contains the start's name. A process also belongs to the start if
    it became a child of this process after the creation of this object. Descendants of these processes belong to the
    start, too. An idle fork server belongs to no start. Use the object as a context manager. Inside the context, this
    process adopts each descendant whose parent ends, so that `find` returns the descendant.
    """

    def __init__(self, job: str) -> None:
        """Store the name of the start, and record the current children of this process, such as a tracker."""
        self._job = job
        self._launcher = this_launcher()  # in tests, several machines' launch scripts run on one host
        self._others = {pid for pid, process in _table().items() if process.parent == os.getpid()}
        self.launcher = 0  # process id of the launcher or of its fork server; `reap` skips this process

    def __enter__(self) -> JobProcesses:
        _adopt_orphans(True)
        return self

    def __exit__(self, *error: object) -> None:
        _adopt_orphans(False)

    def find(self) -> list[int]:
        """Return the ids of the start's processes that still run, in ascending order."""
        table = _table()
        infos = {pid: _job_info(pid) for pid in table}
        marked = {pid for pid, info in infos.items() if (info.job, info.launcher) == (self._job, self._launcher)}
        started = {pid for pid, process in table.items() if process.parent == os.getpid()} - self._others
        found = _with_descendants(marked | started, table)
        # An idle fork server waits for the next start. Only its children belong to this start.
        idle = {pid for pid in found if infos[pid].job == IDLE}
        return sorted(pid for pid in found - idle if not table[pid].is_zombie)

    def ranks(self, program: Path) -> list[int]:
        """Return the process ids of the ranks, found by the variables that launchers set for ranks.

        The children of a rank, and a shell that starts the rank, may have the same variables. For each rank, the method
        returns the outermost process whose command has the word ``program``. If no command has this word, the method
        returns the outermost process with the rank's variables.

        Args:
            program: path of the program that the ranks run.
        """
        table = _table()
        members: dict[int, set[int]] = {}
        own = _rank(os.environ)
        for pid in self.find():
            place = _rank(_variables(_environment(pid)))
            if place and place != own:
                members.setdefault(place[1], set()).add(pid)
        found = []
        for processes in members.values():
            runs_program = {pid for pid in processes if str(program) in _command(pid)}
            found += _outermost(runs_program or processes, table)
        return found

    def kill_all(self, timeout: float) -> None:
        """Kill and reap all processes of the start, so that none of them runs during the next start.

        The method returns after `CLEAN_CHECKS` consecutive checks without a process, at the latest after ``timeout``
        seconds.
        """
        deadline = time.monotonic() + timeout
        checks = 0
        while checks < CLEAN_CHECKS and time.monotonic() < deadline:
            left = self.find()
            checks = 0 if left else checks + 1
            send(left, signal.SIGKILL)
            time.sleep(0.02)
            self.reap()

    def reap(self) -> None:
        """Reap ended children of this process, except `launcher` and the children that `__init__` recorded."""
        for pid in _children():
            if pid not in self._others and pid != self.launcher and _is_zombie(pid):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def send(processes: Iterable[int], number: int) -> None:
    """Send the signal ``number`` to processes; skip processes that have ended or belong to another user."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _adopt_orphans(is_on: bool) -> None:
    """Set whether this process becomes the parent of descendants whose parents end."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


# --- /proc -----------------------------------------------------------------------------------------------------------


def _table() -> dict[int, Process]:
    """Return all processes of this machine by process id."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            table[int(path.parent.name)] = _parse_stat(path.read_text(errors="replace"))
    return table


def _parse_stat(text: str) -> Process:
    state, parent, *_ = text.rpartition(")")[2].split()  # fields after the name, which may have spaces
    return Process(int(parent), state in "ZX")


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace")).is_zombie
    return False


def _children() -> Iterator[int]:
    """Yield the ids of this process's children. This function is faster than `_table`, which reads all processes."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, path.read_text().split())


def _environment(pid: int) -> str:
    """Return a process's NUL-terminated ``NAME=value`` variables; "" if they cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return ""


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _variables(environment: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in environment.split("\0")]
    return {name: value for name, _, value in pairs if name}


def _job_info(pid: int) -> JobInfo:
    """Return the JobInfo in a process's environment; an empty JobInfo if the document is missing or malformed."""
    environment = _environment(pid)
    if DOCUMENT in environment:
        with contextlib.suppress(ConfigError):
            return JobInfo.from_environ(_variables(environment))
    return JobInfo()


def _rank(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the launcher's name and the rank in a process's variables; None if the process is not a rank."""
    try:
        world = env.detect(environ)
    except ConfigError:
        return None
    is_rank = world.role == "worker" and world.launcher != "none"
    return (world.launcher, world.rank) if is_rank else None


def _with_descendants(roots: Collection[int], table: Mapping[int, Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found = set[int]()
    waiting = [*roots]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def _outermost(processes: Collection[int], table: Mapping[int, Process]) -> list[int]:
    """Return the processes that do not descend from another process of ``processes``."""
    below = set[int]()
    for pid in processes:
        below |= _with_descendants([pid], table) - {pid}
    return [pid for pid in processes if pid not in below]
