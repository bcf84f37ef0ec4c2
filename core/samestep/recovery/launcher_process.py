"""Check whether the process that started this rank is still alive."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from samestep.env import World
from samestep.job_info import JobInfo


class LauncherProcess:
    """The process that must outlive this rank: the launch script, or the launcher if no launch script is running.

    Attributes:
        pid: process id; None if no launcher started this rank.
    """

    def __init__(self, world: World) -> None:
        """Store the id and the start time of the process, because the system may reuse its id."""
        self.pid = _launcher(world)
        self._parent = os.getppid()
        self._start = None if self.pid is None else _start_time(self.pid)

    def is_gone(self) -> bool:
        """Return whether the process has ended."""
        if self.pid is None:
            return False
        return self._start is None or _start_time(self.pid) != self._start

    def has_orphaned(self) -> bool:
        """Return whether this rank's parent process, which belongs to the launcher, has ended."""
        return self.pid is not None and os.getppid() != self._parent


def _launcher(world: World) -> int | None:
    """Return the id of the launch script or the launcher; None if no launcher started this rank.

    Without a launcher, the parent is a shell, which may end before the rank does.
    """
    script = JobInfo.from_environ(os.environ).launch_script()
    if world.launcher in ("none", "env") and not script:
        return None
    pid = script or os.getppid()
    return None if pid == 1 else pid


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, "" outside Linux, None if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if not Path("/proc/self/stat").exists():
            os.getsid(pid)
            return ""
        # The command's name, in parentheses, may contain spaces. So count the fields after the name: in proc(5), the
        # state is field 3 and the start time is field 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return fields[19]
    return None
