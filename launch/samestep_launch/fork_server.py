"""Run a fork server: one process imports the program, and forks the launcher at each start of the job.

The launch script starts the server by the launcher's command, with a Unix socket as an additional descriptor. The
server imports the ranks' modules and forks a launcher. After the launcher's end, the server sends the exit code through
the socket and waits for the next start. The server ends when the socket is closed. If the program prevents forking, the
server process runs the launcher itself and ends with the launcher.

The launch script requests each later start by one message. The message consists of the command and the changed
variables in JSON, and of the descriptors of standard output and error. This module imports no third-party package.
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

# Maximum length of a request in bytes. By default, Linux limits a command and its environment to 2 MiB together.
MAX_MESSAGE = 2**22
END_SECONDS = 5.0
MODULE = "samestep_launch.torchrun"
IDLE = "-"  # job name in a server's environment, because a server belongs to no start


class Launcher:
    """A started launcher, with the methods of `subprocess.Popen` that `samestep_launch.supervise` uses."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket | None = None) -> None:
        """Start a thread that waits for the launcher's end.

        Args:
            process: the fork server, or the launcher itself if ``control`` is None.
            control: the socket through which the fork server sends the launcher's exit code.
        """
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
        """Kill the process ``pid`` if the launcher does not end within `END_SECONDS` seconds."""
        if not self._ended.wait(END_SECONDS):
            self._process.kill()

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the launcher's fatal signal; None while the launcher runs."""
        return self._code

    def wait(self) -> int:
        """Wait for the launcher's end; return the exit code, or minus the number of the launcher's fatal signal."""
        self._ended.wait()
        return int(self._code or 0)


class ForkServer:
    """The launch script's handle of the process that forks a job's launchers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._environ: Mapping[str, str] = {}  # the server's environment at its start

    def start(self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> Launcher:
        """Start a launcher with the running server, or with a new server if none runs.

        Args:
            command: the launcher's command, which also starts a server.
            environ: the launcher's environment.
            stdout: descriptor of the launcher's standard output.
            stderr: descriptor of the launcher's standard error.
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
        """Return the variables that differ from the server's environment, by name; None removes a variable."""
        gone = dict.fromkeys(self._environ.keys() - environ.keys())
        return {**gone, **{name: value for name, value in environ.items() if self._environ.get(name) != value}}

    def close(self) -> None:
        """End the server. Call this method after the launchers have ended."""
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
    """Fork a launcher for each start of the job. The function returns in the launchers, but never in a server.

    Args:
        control: socket to the launch script; None if this process must be the launcher itself.
        arguments: arguments of the first start's command.

    Returns:
        The arguments of the launcher's start.
    """
    if control is None:
        return [*arguments]
    idle = replace(JobInfo.from_environ(os.environ), job=IDLE)  # JobProcesses.find skips IDLE processes
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
    """Return the socket to the launch script, and remove its descriptor from os.environ; None without a fork server."""
    info = JobInfo.from_environ(os.environ)
    if info.control is None:
        return None
    os.environ.update(replace(info, control=None, room="").to_environ())
    return socket.socket(fileno=info.control)


def _become_launcher(files: Sequence[int], changes: Mapping[str, str | None]) -> None:
    """Give this forked process a new session, and the launcher's output files and environment."""
    os.setsid()
    for target, number in enumerate(files, start=1):
        os.dup2(number, target)
        os.close(number)
    for name, value in changes.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    process_info.show_environment(os.environ)
    tempfile.tempdir = None  # the cached folder may come from an earlier TMPDIR


def _discard(number: int, is_standard: bool) -> None:
    """Close a launcher's output file in the server, because a pipe's reader waits until all writers close the pipe.

    A standard stream becomes /dev/null instead.
    """
    if not is_standard:
        os.close(number)
        return
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.close(null)


def _next_start(control: socket.socket, code: int) -> tuple[list[str], dict[str, str | None], list[int]]:
    """Send a launcher's exit code, and wait for the request of the next start.

    If the launch script has closed the socket, this process exits.

    Returns:
        The next launcher's arguments, changed variables and output descriptors.
    """
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
