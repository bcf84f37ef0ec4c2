"""Is everyone alive? One thread in every rank.

Each second it writes ``<run-dir>/log/alive-<r>`` (step, this process's updates, time, pid, host). It ends the rank when
the rank's launcher is gone, so that a killed launcher leaves nothing running, and when the rank has made no progress
for ``timeout`` seconds (longer while it compiles), naming the rank that holds the others up: no framework does (they
wait for minutes, then blame whoever noticed). Of that it also leaves ``log/stalled``, at which the launch script ends
what remains of the job.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from samestep import log
from samestep.env import World, launch_script

_TICK = 1.0  # seconds
_SILENT = 5.0  # seconds without a heartbeat after which a rank counts as stopped or dead


class Watchdog:
    """One thread that outlives every wait in a framework's C++, and ends the process where waiting is in vain."""

    def __init__(self, world: World, timeout: float, first_step_timeout: float | None = None) -> None:
        """Start watching. In seconds; ``first_step_timeout`` until the first update, which may have to be compiled."""
        self._folder: Path | None = None
        self._rank, self._world_size, self._timeout = world.rank, world.world_size, timeout
        self._compile_timeout = first_step_timeout
        self.compiles()
        self._job = os.environ.get("SAMESTEP_JOB", "")
        self._step = self._updates = 0
        self._writing, self._stopped = threading.Lock(), threading.Event()
        self._last_progress = time.monotonic()  # waiting for ranks that never come is no progress either
        self._launchers = {pid: _start_time(pid) for pid in _launchers(world)}
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def write_to(self, folder: Path) -> None:
        """Leave heartbeats in ``folder`` from here on: the first that is given, of a run dir on this machine."""
        self._folder = self._folder or folder
        self._write_alive()

    def restored(self, step: int) -> None:
        """The rank goes on from ``step``: updates that other processes have done."""
        self._step, self._last_progress = step, time.monotonic()
        self._write_alive()

    def compiles(self) -> None:
        """What comes next is compiled first, which may take as long as the first update: until the next beat."""
        self._compiling = self._compile_timeout is not None

    def beat(self, step: int | None = None) -> None:
        """The rank goes on: after each update, ``step`` of them being done, and after each evaluated batch."""
        self._last_progress, self._compiling = time.monotonic(), False
        if step is not None:
            self._step, self._updates = step, self._updates + 1
            if self._updates == 1:  # at once: the launch script wants to know whether a failed start got so far
                self._write_alive()

    def stop(self) -> None:
        """Watch no longer: the rank is done."""
        self._stopped.set()

    def _watch(self) -> None:
        ticked = time.monotonic()
        while not self._stopped.wait(_TICK):
            now = time.monotonic()
            if now - ticked > _SILENT:  # this process itself was stopped and continues: it deserves a new chance
                self._last_progress = now
            ticked = now
            self._write_alive()
            for pid, started in self._launchers.items():
                if started is None or _start_time(pid) != started:
                    log.error(f"rank {self._rank}: its launcher (pid {pid}) is gone; ending")
                    os._exit(1)
            timeout = self._compile_timeout if self._compiling and self._compile_timeout else self._timeout
            if now - self._last_progress > timeout:
                culprit = self._culprit()
                hint = "; if it was still compiling, give it a longer --first-step-timeout" if self._compiling else ""
                log.error(f"no progress for {timeout:g} s: {culprit}{hint}")
                # At this file the launch script ends the job: after the line, so that the line is not lost.
                self._write("stalled", {"job": self._job, "rank": self._rank, "culprit": culprit})
                os._exit(1)

    def _write_alive(self) -> None:
        values = {
            "step": self._step,
            "updates": self._updates,
            "time": time.time(),
            "rank": self._rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "job": self._job,
        }
        with self._writing:
            self._write(f"alive-{self._rank}", values)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if self._folder is None:
            return
        temporary = self._folder / f".{name}.{self._rank}.tmp"
        try:
            temporary.write_text(json.dumps(values))
            temporary.replace(self._folder / name)
        except OSError:
            pass  # a full disk stops no training; the checkpoint will tell

    def _culprit(self) -> str:
        """The rank that holds the others up, as far as this machine's files tell."""
        alive = [found for rank in range(self._world_size) if (found := self._read_alive(rank))]
        if not alive:
            return f"rank {self._rank} at step {self._step}; no heartbeat can be read"
        now = time.time()
        silent = [one for one in alive if now - one["time"] > _SILENT]
        # A stopped or dead rank has stopped writing; if all write, the one with the fewest steps is stuck.
        one = min(silent, key=lambda one: one["time"]) if silent else min(alive, key=lambda one: one["step"])
        where = f"rank {one['rank']} ({one['host']}, pid {one['pid']}) last alive at step {one['step']}"
        if silent:
            return f"{where}, silent for {now - one['time']:.0f} s"
        missing = self._world_size - len(alive)
        return where + (f"; {missing} of {self._world_size} ranks never seen from here" if missing else "")

    def _read_alive(self, rank: int) -> dict[str, Any] | None:
        try:
            values: dict[str, Any] = json.loads(Path(self._folder or "", f"alive-{rank}").read_text())
        except (OSError, ValueError):
            return None
        whole = isinstance(values, dict) and {"step", "time", "rank", "pid", "host"} <= values.keys()
        return values if whole and values.get("job") == self._job else None


def _launchers(world: World) -> list[int]:
    """The process without which this rank is an orphan: the launch script, which sees to the launcher; else that.

    A rank that no launcher started has a shell for a parent, whose end means nothing.
    """
    script = launch_script(os.environ)
    by_hand = world.launcher in ("none", "env") and not script
    return [] if by_hand else [pid for pid in [script or os.getppid()] if pid > 1]


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie. "" where not Linux."""
    try:
        # The command's name, in parentheses, may hold spaces: fields are counted after it (proc(5): 3 state, 22 start).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if not Path("/proc/self/stat").exists():
            return "" if _exists(pid) else None
        return None
    except ProcessLookupError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
