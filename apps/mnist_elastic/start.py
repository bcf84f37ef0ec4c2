"""Start ranks on this machine, by fork from a process that has imported train.py, or as new programs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from samestep.job_info import JobInfo

MAX_MESSAGE = 2**16  # maximum size of a message, in bytes


class Process(Protocol):
    """A started rank, with the interface of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return the exit code, or a negative signal number; None while the process runs."""

    def kill(self) -> None:
        """Kill the process."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the process ends.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """


class Starter:
    """Start the ranks of one job on this machine."""

    def __init__(self, program: Sequence[str], place: str) -> None:
        """Prepare to start ranks, by fork if the launch script runs a forker.

        Args:
            program: path of train.py and its arguments.
            place: host, port and key of the launcher, for `JobInfo.members`.
        """
        self._program = program
        self._info = replace(JobInfo.from_environ(os.environ), machines=None, members=place)
        self._forker: Forker | None = None
        if self._info.forker is not None:
            self._forker = Forker(self._info.forker)

    def start(self, rank: int, name: str, ranks: int) -> Process:
        """Start a rank, and return its process.

        Args:
            rank: number of the rank.
            name: name of the process in groups.
            ranks: number of ranks that the job starts with.
        """
        info = replace(self._info, forker=None, rank=rank, name=name, ranks=ranks)
        if self._forker:
            return self._forker.start(self._program[1:], info.to_environ())
        environ = {**os.environ, **info.to_environ()}
        return subprocess.Popen([sys.executable, *self._program], env=environ, stdin=subprocess.DEVNULL)


class Forker:
    """A connection to the forker, a process of the launch script that has imported train.py and forks ranks.

    Messages are JSON objects. Requests have the keys ``start``, ``arguments`` and ``environ``, or the key ``kill``.
    The forker's messages have the keys ``ended`` and ``code``. The value of ``start``, ``kill`` and ``ended`` is the
    number by which this class identifies a rank.
    """

    def __init__(self, descriptor: int) -> None:
        """Connect by ``descriptor``, the file descriptor of a socket to the forker."""
        self._socket = socket.socket(fileno=descriptor)
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}
        self._is_gone = False
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, arguments: Sequence[str], environ: dict[str, str]) -> ForkedRank:
        """Fork a rank that runs train.py with ``arguments``. Add ``environ`` to the rank's environment."""
        number = next(self._numbers)
        self.send(start=number, arguments=[*arguments], environ=environ)
        return ForkedRank(self, number)

    def send(self, **message: Any) -> None:
        """Send a message. If the forker has ended, do nothing, because the launch script then ends this process."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode())

    def code(self, number: int) -> int | None:
        """Return the exit code of a rank, or a negative signal number; None while the rank runs."""
        return self._codes.get(number)

    def wait(self, number: int, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds for the end of a rank. Return whether the rank or the forker has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: number in self._codes or self._is_gone, timeout)

    def _receive(self) -> None:
        """Record the exit codes that the forker sends."""
        while True:
            content = b""
            with contextlib.suppress(OSError):
                content = self._socket.recv(MAX_MESSAGE)
            with self._changed:
                self._is_gone = not content
                if content:
                    message = json.loads(content)
                    self._codes[message["ended"]] = message["code"]
                self._changed.notify_all()
            if not content:
                return


class ForkedRank:
    """A forked rank, with the interface of `Process`."""

    def __init__(self, forker: Forker, number: int) -> None:
        """Store the forker and the number by which `Forker` identifies the rank."""
        self._forker = forker
        self._number = number

    def poll(self) -> int | None:
        """Return the exit code, or a negative signal number; None while the rank runs."""
        return self._forker.code(self._number)

    def kill(self) -> None:
        """Kill the rank by SIGKILL."""
        self._forker.send(kill=self._number)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the rank or the forker ends.

        Raises:
            subprocess.TimeoutExpired: the rank still runs after ``timeout`` seconds.
        """
        if not self._forker.wait(self._number, timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
