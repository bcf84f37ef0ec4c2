"""End the processes of tests when their test run is interrupted, or when the process that started it ends.

pytest's workers have no terminal, and a killed tox or pytest cannot end them. Their tests may wait minutes for
launchers and ranks in other sessions, which would disturb the next test run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from types import FrameType
from typing import NoReturn

import pytest
from processes import is_running, marked, parent

MARK = "PYTEST_PROCESS"  # variable in the environment of all processes that tests start
EVERY = 0.5  # seconds between two checks of the parent
LIMIT = 10.0  # seconds for the fixtures to end
KILL_LIMIT = 3.0


def children() -> dict[int, list[int]]:
    """Return the children of each process, by its id."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.setdefault(parent(int(name)), []).append(int(name))
    return found


def descendants() -> set[int]:
    """Return the IDs of the running descendants of this process."""
    known = children()
    found = set[int]()
    waiting = [os.getpid()]
    while waiting:
        new = known.get(waiting.pop(), [])
        found |= {*new}
        waiting += new
    return {pid for pid in found if is_running(pid)}


def interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """Interrupt pytest, and ignore further SIGINT, because the terminal and tox both send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


class Interrupts:
    """A plugin of one pytest process, which is the main process or a worker."""

    def __init__(self, config: pytest.Config) -> None:
        self.manager = config.pluginmanager
        self.done = threading.Event()
        self.mark = uuid.uuid4().hex
        os.environ[MARK] = self.mark
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt_once)
        if "PYTEST_XDIST_WORKER" in os.environ or "TOX_ENV_NAME" in os.environ:
            threading.Thread(target=self.watch, args=(os.getppid(),), name="interrupts", daemon=True).start()

    def watch(self, started_by: int) -> None:
        """Interrupt this process when its parent has ended."""
        while os.getppid() == started_by:
            if self.done.wait(EVERY):
                return
        if callable(signal.getsignal(signal.SIGINT)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.done.wait(LIMIT)
        self.end_processes()
        os._exit(1)

    def end_processes(self) -> None:
        """Kill all processes that the tests of this process have started."""
        deadline = time.monotonic() + KILL_LIMIT
        while (left := descendants() | {*marked(MARK, self.mark)} - {os.getpid()}) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        """End the tests' processes, so that the fixtures end soon."""
        if not self.manager.hasplugin("dsession"):
            self.end_processes()
            return
        for pid in children().get(os.getpid(), []):  # the workers
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def pytest_unconfigure(self) -> None:
        self.done.set()
