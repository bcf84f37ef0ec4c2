"""Start a launcher at each start of a job from one process that has imported the program: a fork server.

The first start is a program like any other launcher, with one more descriptor: a Unix socket. Once this process has
imported what its ranks need, it forks a launcher, sends the exit code through the socket, and waits for the next start.
It ends when the socket is closed. A process that cannot fork is itself the launcher, and ends with the job.
This module uses the standard library alone.

A start is one message: the command and the environment in JSON, and the descriptors of standard output and error.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from samestep.job_info import JobInfo

from samestep_launch import process_info

MAX_MESSAGE = 2**22  # bytes; the kernel limits commands and environments to less
END_SECONDS = 5.0
MODULE = "samestep_launch.torchrun"
IDLE = "-"  # the job of a server between two starts


class Launcher:
    """A started launcher, with the interface of `subprocess.Popen` that `samestep_launch.supervise` uses."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket | None = None) -> None:
        """Without ``control``, the process itself is the launcher."""
        self._process = process
        self._control = control
        self._code: int | None = None
        self._ended = threading.Event()
        self.pid = process.pid
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        code = b""
        with contextlib.suppress(OSError):
            code = self._control.recv(64) if self._control else b""
        self._code = int(code) if code else self._process.wait()
        self._ended.set()

    def kill(self) -> None:
        """End a launcher that has no process left."""
        if not self._ended.wait(END_SECONDS):  # the server is stopped
            self._process.kill()

    def poll(self) -> int | None:
        """Return the exit code, or minus a signal; None while the launcher runs."""
        return self._code

    def wait(self) -> int:
        """Wait for the end; return the exit code, or minus a signal."""
        self._ended.wait()
        return int(self._code or 0)


class ForkServer:
    """The process from which a job's launchers are forked, as the launch script sees it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._environ: Mapping[str, str] = {}  # at its start

    def start(self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> Launcher:
        """Start a launcher, by a new server if there is none.

        Args:
            command: the launcher's command, which also starts a server.
            environ: the launcher's environment.
            stdout: the descriptor of its standard output.
            stderr: the descriptor of its standard error.
        """
        if self._process and self._control and self._process.poll() is None:
            request = json.dumps([[*command], self._changes(environ)]).encode()
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [request], [stdout, stderr])
                return Launcher(self._process, self._control)
        self.close()
        self._environ = environ
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            room = "-" * process_info.ROOM_BYTES
            info = replace(JobInfo.from_environ(environ), control=theirs.fileno(), room=room)
            self._process = subprocess.Popen(
                command,
                env={**environ, **info.to_environ()},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        return Launcher(self._process, self._control)

    def _changes(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables that differ from the server's; None for one that must go."""
        gone = dict.fromkeys(self._environ.keys() - environ.keys())
        return {**gone, **{name: value for name, value in environ.items() if self._environ.get(name) != value}}

    def close(self) -> None:
        """End the server. Its launchers have ended before."""
        if self._control:
            self._control.close()
        if self._process:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        self._control = None


# --- in the server ---------------------------------------------------------------------------------------------------


def serve(control: socket.socket | None, arguments: Sequence[str]) -> list[str]:
    """Fork a launcher for this start, and for each later one. Returns in each launcher alone.

    Args:
        control: the launch script's socket; None if there is none, and then this process is the launcher.
        arguments: of this start's command.

    Returns:
        The arguments of the start.
    """
    if control is None:
        return [*arguments]
    idle = replace(JobInfo.from_environ(os.environ), job=IDLE)  # else the launch script kills it as the job's
    process_info.show_environment({**os.environ, **idle.to_environ()})
    files: list[int] = []
    changes: dict[str, str | None] = {}
    while True:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        launcher = os.fork()
        if launcher == 0:
            control.close()
            _become_launcher(files, changes)
            return [*arguments]
        for number in files or (1, 2):
            _discard(number, is_standard=not files)
        _, status = os.waitpid(launcher, 0)
        arguments, changes, files = _next_start(control, os.waitstatus_to_exitcode(status))


def control_socket() -> socket.socket | None:
    """Return the launch script's socket; None if a person started this process. Its ranks do not inherit it."""
    info = JobInfo.from_environ(os.environ)
    if info.control is None:
        return None
    os.environ.update(replace(info, control=None, room="").to_environ())
    return socket.socket(fileno=info.control)


def _become_launcher(files: Sequence[int], changes: Mapping[str, str | None]) -> None:
    """Take the session, the files and the environment of a launcher's process."""
    os.setsid()
    for target, number in enumerate(files, start=1):
        os.dup2(number, target)
        os.close(number)
    for name, value in changes.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    process_info.show_environment(os.environ)
    tempfile.tempdir = None  # of an earlier TMPDIR


def _discard(number: int, is_standard: bool) -> None:
    """Give up a launcher's file: the reader of a pipe waits until the last writer has closed it."""
    if not is_standard:
        os.close(number)
        return
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.close(null)


def _next_start(control: socket.socket, code: int) -> tuple[list[str], dict[str, str | None], list[int]]:
    """Send a launcher's exit code; return arguments, changed variables and files of the next. Ends without a next."""
    try:
        control.send(str(code).encode())
        message, files, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
    except OSError:
        message = b""
        files = []
    if not message:
        os._exit(0)
    command, changes = json.loads(message)
    return command[command.index("-m") + 2 :], changes, files
