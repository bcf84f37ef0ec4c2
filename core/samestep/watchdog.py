"""Is everyone alive? Two threads in every rank.

One writes ``<run-dir>/log/alive-<r>`` each second (step, time, pid, host, and where the main thread stands), so that of
a rank that is stopped one knows where it was. The other ends the rank when its launcher is gone, so that a killed
launcher leaves nothing running, and when the rank has made no progress for ``timeout`` seconds (longer while it
compiles), naming the rank that holds the others up and its line of code: no framework does (they wait for minutes, then
blame whoever noticed). Who is to blame is found by `hang`, which is loaded then; of it ``log/hang-<r>.json`` is left of
each rank, and ``log/stalled``, at which the launch script ends what remains of the job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from samestep import log
from samestep.env import World, launch_script

_TICK = 1.0  # seconds
_SILENT = 5.0  # seconds without a heartbeat after which a rank counts as stopped or dead
_HELD = 2.5  # seconds without a heartbeat after which a C thread of Python's, which needs no interpreter, writes stacks
_ORPHANED = 3.0  # seconds in which a rank without its launcher may save a step
_EXPLAINED = 1.7  # seconds that it may take to find out who is to blame

_MAIN = getattr(sys.modules["__main__"], "__file__", None)
_OWN = tuple(f"{Path(file).absolute().parent}{os.sep}" for file in (__file__, _MAIN) if file)


class Watchdog:
    """What outlives every wait in a framework's C++, and ends the process where waiting is in vain.

    ``collectives``, where the app's ranks.py has it, tells the collective that this rank called last.
    """

    collectives: Callable[[], dict[str, Any] | None] | None = None

    def __init__(self, world: World, timeout: float, first_step_timeout: float | None = None) -> None:
        """Start watching. In seconds; ``first_step_timeout`` until the first update, which may have to be compiled."""
        self.folder: Path | None = None
        self._stacks: IO[str] | None = None
        self._rank, self.world_size, self._timeout = world.rank, world.world_size, timeout
        self._compile_timeout = first_step_timeout
        self.compiles()
        self.job = os.environ.get("SAMESTEP_JOB", "")
        self._step = self._updates = 0
        self._writing, self._stopped = threading.Lock(), threading.Event()
        self.last_progress = time.monotonic()  # waiting for ranks that never come is no progress either
        self._launcher, self._parent = _launcher(world), os.getppid()
        self._launched = _start_time(self._launcher) if self._launcher else None
        for target in (self._watch, self._beats):
            threading.Thread(target=target, name="watchdog", daemon=True).start()

    def write_to(self, folder: Path) -> None:
        """Leave heartbeats in ``folder`` from here on: the first that is given, of a run dir on this machine."""
        self.folder = self.folder or folder
        with contextlib.suppress(OSError):
            self._stacks = self._stacks or Path(self.folder, f"stack-{self._rank}.txt").open("a")
            self._stacks.truncate(0)  # of an earlier start; appended to, as a truncated file's writer keeps its place
            if not faulthandler.is_enabled():  # where a framework's C++ aborts, no line of Python can say so
                faulthandler.enable(self._stacks)
        self._write_alive()

    def restored(self, step: int) -> None:
        """The rank goes on from ``step``: updates that other processes have done."""
        self._step, self.last_progress = step, time.monotonic()
        self._write_alive()

    def compiles(self) -> None:
        """What comes next is compiled first, which may take as long as the first update: until the next beat."""
        self._compiling = self._compile_timeout is not None

    def beat(self, step: int | None = None) -> None:
        """The rank goes on: after each update, ``step`` of them being done, and after each evaluated batch."""
        self.last_progress, self._compiling = time.monotonic(), False
        if step is not None:
            self._step, self._updates = step, self._updates + 1
            if self._updates == 1:  # at once: the launch script wants to know whether a failed start got so far
                self._write_alive()

    def stop(self) -> None:
        """Watch no longer: the rank is done."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks:
            Path(self._stacks.name).unlink(missing_ok=True)

    def is_orphan(self) -> bool:
        """Whether the launcher that started this rank is gone: what other ranks hear of it then is of a failure."""
        return self._launcher is not None and os.getppid() != self._parent

    def _watch(self) -> None:
        ticked = time.monotonic()
        while not self._stopped.wait(min(_TICK, max(0.05, self.last_progress + self._limit() - ticked))):
            now = time.monotonic()
            if now - ticked > _SILENT:  # this process itself was stopped and continues: it deserves a new chance
                self.last_progress = now
            ticked = now
            if self._launcher and (self._launched is None or _start_time(self._launcher) != self._launched):
                log.error(f"rank {self._rank}: its launcher (pid {self._launcher}) is gone; ending")
                if callable(signal.getsignal(signal.SIGTERM)):  # a Run listens: a step may still be saved
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(_ORPHANED)
                os._exit(1)
            if now - self.last_progress > self._limit():
                self._end()

    def _limit(self) -> float:
        return self._compile_timeout if self._compiling and self._compile_timeout else self._timeout

    def _end(self) -> None:
        """Tell who is to blame, and end: no wait here is endless, as what blocks the rank may block files as well."""
        until = time.monotonic() + _EXPLAINED
        plain = f"rank {self._rank} ({socket.gethostname()}, pid {os.getpid()}) last alive at step {self._step}"
        text = f"no progress for {self._limit():g} s: {(culprit := within(_EXPLAINED, self._hang, until) or plain)}"
        text += "; if it was still compiling, give it a longer --first-step-timeout" if self._compiling else ""
        more = f"; python -m samestep.autopsy {self.folder.parent} shows all stacks" if self.folder else ""
        within(_TICK, log.error, text + more)
        within(_TICK, self._hang, 0.0, culprit)
        # At this file the launch script ends the job: after the line, so that the line is not lost.
        within(_TICK, self.write, "stalled", {"job": self.job, "rank": self._rank, "culprit": culprit})
        os._exit(1)

    def _hang(self, until: float, told: str = "") -> str:
        from samestep import hang  # only a rank that hangs needs it

        return hang.keep(self, told) if told else hang.explain(self, until)

    def _beats(self) -> None:
        """Apart from what ends the rank: a disk that hangs stops this thread."""
        while not self._stopped.wait(_TICK):
            self._write_alive()
            if time.monotonic() - self.last_progress > self._limit() / 2:
                with contextlib.suppress(Exception):
                    from samestep import hang  # before seconds count

                    hang.leave_if_others_hang(self)

    def values(self) -> dict[str, Any]:
        """What a heartbeat says of this rank; ``at`` is where its main thread stands: file, line and function."""
        its = {"rank": self._rank, "pid": os.getpid(), "host": socket.gethostname(), "job": self.job}
        return {**its, "step": self._step, "updates": self._updates, "time": time.time(), "at": _stands()}

    def _write_alive(self) -> None:
        with self._writing:
            self.write(f"alive-{self._rank}", self.values())
            with contextlib.suppress(OSError):
                if self._stacks and not self._stopped.is_set():
                    self._stacks.truncate(0)
                    faulthandler.dump_traceback_later(_HELD, file=self._stacks)  # unless the next heartbeat comes

    def write(self, name: str, values: dict[str, Any]) -> None:
        """A file of ``log/``, whole or not at all."""
        if self.folder is None:
            return
        temporary = self.folder / f".{name}.{self._rank}.tmp"
        with contextlib.suppress(OSError):  # a full disk stops no training; the checkpoint will tell
            temporary.write_text(json.dumps(values))
            temporary.replace(self.folder / name)


def is_own(file: str) -> bool:
    """Whether a file of code is the program's or this package's, and not what they call."""
    return file.startswith(_OWN) and ("site-packages" not in file or file.startswith(_OWN[0]))


def _stands() -> tuple[str, int, str] | None:
    """File, line and function in which the main thread stands: of its own code but this file, the innermost call."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and (frame.f_code.co_filename == __file__ or not is_own(frame.f_code.co_filename)):
        frame = frame.f_back
    frame = frame or innermost
    return (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else None


def within(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """What ``call`` gives; None where it takes longer, or raises: nothing may keep a rank from ending."""
    given: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            given.append(call(*arguments))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return given[0] if given else None


def _launcher(world: World) -> int | None:
    """The process without which this rank is an orphan: the launch script, which sees to the launcher; else that.

    A rank that no launcher started has a shell for a parent, whose end means nothing.
    """
    script = launch_script(os.environ)
    by_hand = world.launcher in ("none", "env") and not script
    pid = script or os.getppid()
    return None if by_hand or pid == 1 else pid


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
    except OSError as problem:
        return not isinstance(problem, ProcessLookupError)  # but a PermissionError
    return True
