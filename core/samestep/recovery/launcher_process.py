"""Find out whether the process that started this rank still lives."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from samestep.env import World
from samestep.job_info import JobInfo


class LauncherProcess:
    """The process that must outlive this rank: the launch script, or without one the launcher.

    Attributes:
        pid: its number; None for a rank that no launcher started.
    """

    def __init__(self, world: World) -> None:
        """Note the process and when it started, because another one may get its number."""
        self.pid = _launcher(world)
        self._parent = os.getppid()
        self._start = None if self.pid is None else _start_time(self.pid)

    def is_gone(self) -> bool:
        """Return whether the process has ended."""
        if self.pid is None:
            return False
        return self._start is None or _start_time(self.pid) != self._start

    def has_orphaned(self) -> bool:
        """Return whether this rank's own parent, which is the launcher or a part of it, has ended."""
        return self.pid is not None and os.getppid() != self._parent


def _launcher(world: World) -> int | None:
    """Return the number of the process.

    The parent of a rank that no launcher started is a shell, whose end means nothing.
    """
    script = JobInfo.from_environ(os.environ).launch_script()
    if world.launcher in ("none", "env") and not script:
        return None
    pid = script or os.getppid()
    return None if pid == 1 else pid


def _start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it is gone or a zombie. "" if not on Linux."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if not Path("/proc/self/stat").exists():
            os.getsid(pid)
            return ""
        # The command's name, in parentheses, may hold spaces. Count fields after it (proc(5): 3 state, 22 start).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return fields[19]
    return None
