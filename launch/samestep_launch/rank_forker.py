"""Fork ranks for an app's own launcher from one process that has imported the app's program.

    python -m samestep_launch.rank_forker TRAIN LAUNCHER [the launcher's arguments]

This process imports TRAIN once and forks the launcher. This process then forks a rank for each request of the launcher,
including requests to restart a rank. The launcher communicates by a Unix socket, whose descriptor is `JobInfo.forker`.
Messages are JSON:

    {"start": 7, "arguments": [...], "environ": {"NAME": "value"}}    to this process, with the variables to change
    {"kill": 7}                                                       to this process
    {"ended": 7, "code": -9}                                          to the launcher; code: exit code or minus a signal

The launcher chooses the number of each rank, here 7. If this process cannot fork ranks, it becomes the launcher, which
then starts a Python process for each rank. This process exits with the launcher's exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any, NoReturn

from samestep.job_info import JobInfo

from samestep_launch import fork_server, process_info
from samestep_launch.program import ImportFailed, Program, importing


def main() -> None:
    """Import the program, then fork the launcher and its ranks at each start of the job."""
    control = fork_server.control_socket()
    arguments = sys.argv[1:]
    with importing():  # torch imports numpy, which must not start threads
        from samestep_launch.elastic_agent import load
    program = Program(Path(arguments[0]))
    if not load(program, []):
        os.execv(sys.executable, [sys.executable, *arguments[1:]])
    _, launcher, *rest = fork_server.serve(control, arguments)
    RankForker(program).run(Path(launcher), rest)


class RankForker:
    """A server that forks a launcher and its ranks from this process."""

    def __init__(self, program: Program) -> None:
        """Store the ranks' program, which this process has imported."""
        self._program = program
        self._socket, self._launchers_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks: dict[int, int] = {}  # process id by the number that the launcher chose for the rank
        self._launcher = 0
        self._wake_read, self._wake_write = os.pipe()  # the pipe becomes readable when a child ends
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self, launcher: Path, arguments: Sequence[str]) -> NoReturn:
        """Fork the launcher, handle requests until the launcher ends, and exit with the launcher's exit code."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._launcher = self._fork(lambda: self._run_launcher(launcher, arguments))
        self._launchers_socket.close()
        while True:
            ready, _, _ = select([self._socket.fileno(), self._wake_read], [], [])
            if self._socket.fileno() in ready:
                self._take_request()
            self._reap()

    def _take_request(self) -> None:
        message = self._socket.recv(fork_server.MAX_MESSAGE)
        if not message:  # an ended launcher has closed its socket
            os.waitid(os.P_PID, self._launcher, os.WEXITED | os.WNOWAIT)
            return
        request = json.loads(message)
        if "start" in request:
            self._ranks[request["start"]] = self._fork(lambda: self._run_rank(request))
        elif request["kill"] in self._ranks:
            os.kill(self._ranks[request["kill"]], signal.SIGKILL)

    def _reap(self) -> None:
        """Report each ended rank to the launcher; exit if the launcher itself has ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 2**16)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._launcher:
                _end_like(code)
            self._report(pid, code)

    def _report(self, pid: int, code: int) -> None:
        number = next((number for number, each in self._ranks.items() if each == pid), None)
        if number is None:  # a child that the program started at its import
            return
        del self._ranks[number]
        with contextlib.suppress(OSError):  # the launcher is ending
            self._socket.send(json.dumps({"ended": number, "code": code}).encode())

    def _fork(self, run: Callable[[], int]) -> int:
        """Fork a process that exits with the code that ``run`` returns; return the id of the forked process."""
        _flush()
        pid = os.fork()
        if pid > 0:
            return pid
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        code = run()
        _flush()
        os._exit(code)

    def _run_launcher(self, path: Path, arguments: Sequence[str]) -> int:
        info = replace(JobInfo.from_environ(os.environ), forker=self._launchers_socket.fileno())
        _become(info.to_environ())
        launcher = Program(path)
        try:
            launcher.load(arguments)
        except ImportFailed as failure:
            return failure.exit_code
        return launcher.run(arguments)

    def _run_rank(self, request: Mapping[str, Any]) -> int:
        environ = request["environ"]
        path = self._program.path
        rank = JobInfo.from_environ(environ).rank
        process_info.set_title(f"rank {rank}: {path.parent.name} {path.name}")
        _become(environ)
        return self._program.run(request["arguments"])


def _become(changes: Mapping[str, str]) -> None:
    """Set variables in the environment of this forked process, and unload this package."""
    os.environ.update(changes)
    process_info.show_environment(os.environ)
    process_info.forget_launcher()


def _end_like(code: int) -> NoReturn:
    """Exit with the launcher's exit code, or by the signal that ended the launcher."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL cannot have a handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


if __name__ == "__main__":
    main()
