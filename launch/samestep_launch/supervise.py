"""Start a job's launcher once, forward its messages and signals, and leave no process of the job behind.

This module uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Protocol

from samestep import ConfigError, env, events, untrusted
from samestep.job_info import JobInfo
from samestep.root import Root

from samestep_launch import job_processes, machine
from samestep_launch.job_processes import JobProcesses
from samestep_launch.stderr_forwarder import StderrForwarder

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # at which ranks save a checkpoint and exit
STOP_SECONDS = 10.0  # from the first signal to SIGKILL if no rank can save
REPEATED = 1.0  # a signal within these seconds repeats the first, except Ctrl-C: Slurm signals all processes of a step
POLL_SECONDS = 0.25  # between checks whether a watchdog has reported a stalled rank
HEARTBEAT_SECONDS = 1.0  # between checks whether the ranks' heartbeats have changed, which they do as often
DIAGNOSIS_SECONDS = 10.0  # beyond --timeout, because a watchdog's report comes first and has more facts
START_SECONDS = 60.0  # that ranks have at least for their first heartbeat, because imports take long
PAUSE_SECONDS = 5.0  # without a check after which this process itself was stopped, or its machine slept
HEARTBEAT = {
    "host": untrusted.text(255),
    "pid": untrusted.integer(0, 2**31),
    "rank": untrusted.integer(0, 2**31),
    "step": untrusted.integer(0, 2**63),
    "updates": untrusted.integer(0, 2**63),
}


class Stopped(BaseException):
    """The signal INT, TERM, USR1 or HUP arrived."""

    def __init__(self, number: int) -> None:
        self.number = number


def stop_on_signals() -> None:
    """Raise Stopped on INT, TERM, USR1 and HUP from now on."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(number)

    for number in (*STOPS, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, stop)


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Delay the signals that arrive inside this context until its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*STOPS, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment(info: JobInfo, nproc: int, address: str | None = None) -> dict[str, str]:
    """Return the environment of one start of the launcher and of its ranks.

    Args:
        info: what the ranks must know of the job.
        nproc: ranks on this machine.
        address: this machine's address among the others; None on one machine.
    """
    # Another launcher may have left its variables. The ranks of this job get their places from its own launcher.
    stale = env.launcher_variables()
    removed = ("PET_", "SAMESTEP_SECRET")
    environ = {}
    for name, value in os.environ.items():
        if name not in stale and not name.startswith(removed):
            environ[name] = value
    environ.update(info.to_environ())
    if not environ.get("OMP_NUM_THREADS"):
        environ["OMP_NUM_THREADS"] = str(max(1, machine.processors() // nproc))
    # Some launchers call `python` by name, which must be this one.
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    # gloo would listen on the address of the host's name, which other machines may not reach.
    interface = machine.interface_of("127.0.0.1" if info.machines is None else address)
    if interface and not environ.get(machine.GLOO_INTERFACE):
        environ[machine.GLOO_INTERFACE] = interface
    return environ


class Process(Protocol):
    """A launcher that has been started."""

    @property
    def pid(self) -> int:
        """The process that was started: the launcher, or the fork server that forked it."""

    def poll(self) -> int | None:
        """Return the exit code, or minus a signal; None while it runs."""

    def wait(self) -> int:
        """Wait for the end; return the exit code, or minus a signal."""

    def kill(self) -> None:
        """Kill it, if it has not ended."""


# Starts a launcher with a command, an environment, and descriptors for standard output and error.
Starter = Callable[[Sequence[str], Mapping[str, str], int, int], Process]


def start_program(command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> Process:
    """Start a launcher as a program.

    Args:
        command: the launcher's words.
        environ: its whole environment.
        stdout: file descriptor of its standard output.
        stderr: file descriptor of its standard error.
    """
    # A session of its own: Ctrl-C reaches the launch script alone, which then stops all others in order.
    null = subprocess.DEVNULL
    return subprocess.Popen(command, env=environ, stdin=null, stdout=stdout, stderr=stderr, start_new_session=True)


class LauncherEnd(NamedTuple):
    """How a launcher ended.

    Attributes:
        code: the exit code, or minus a signal.
        ended_rank: names the rank that a signal ended, for the message; or "".
    """

    code: int
    ended_rank: str = ""


@dataclass(frozen=True)
class Start:
    """One start of a launcher.

    Attributes:
        job: its name, the same on all machines.
        command: the launcher's command.
        environ: from `environment`.
        logs: the run dir's ``log`` folder.
        grace: seconds in which ranks save and exit after a signal.
        startup_grace: the same, if no rank has written a heartbeat.
        watch: finds ranks that cannot report a hang themselves.
        line_prefix: a regular expression for the launcher's prefix of each line of a rank's stderr.
        stop_hint: follows "stopping (SIGTERM)" on the console.
        program: the ranks' program, if it may have no watchdog. The console then shows all of stderr, and not only
            one-line messages, until a rank writes a heartbeat: programs with a watchdog keep their output in log
            files. And ranks get a signal also without a heartbeat.
        start: starts the launcher.
    """

    job: str
    command: Sequence[str]
    environ: Mapping[str, str]
    logs: Path
    grace: float
    startup_grace: float
    watch: HeartbeatWatch
    line_prefix: str = ""
    stop_hint: str = ""
    program: Path | None = None
    start: Starter = start_program

    def keeps_files(self) -> bool:
        """Return whether the launcher keeps its ranks' output in files: its command names the logs' folder."""
        return any(str(self.logs) in word for word in self.command)

    def shows_stderr(self) -> bool:
        """Return whether the console shows all of stderr."""
        return self.program is not None and not any(heartbeats(self.job, self.logs))

    def ranks_without_heartbeat(self, launcher: int, processes: JobProcesses) -> list[int]:
        """Return the processes that may be ranks without a watchdog; ``launcher`` is the process that was started."""
        if self.program is None:
            return []
        is_rank = str(self.program) == self.command[1]  # one rank, without a launcher
        if is_rank:
            return [launcher]
        return processes.ranks(self.program)


def run_once(start: Start) -> LauncherEnd:
    """Run the launcher once; return how it ended when all of the job's processes have ended.

    Raises:
        Stopped: a signal arrived, and all of the job's processes have ended.
        ConfigError: launcher.log cannot be written.
    """
    log = open_log(start.logs / "launcher.log")
    with contextlib.suppress(OSError):  # a full disk must not end the job
        log.write(f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} {shlex.join(start.command)}\n".encode())
    # The launcher's stderr goes through this pipe. Ranks whose launcher keeps their output in files open the pipe too,
    # and this process's stdout. Such a launcher then repeats those files on its own stdout, which belongs in the log.
    messages, errors = os.pipe()
    output = errors if start.keeps_files() and _can_be_opened(1) else 1
    forwarder = StderrForwarder(
        messages, log, line_prefix=start.line_prefix, shows=start.shows_stderr, show=print_stderr
    )
    forwarding = threading.Thread(target=forwarder.run, daemon=True)
    forwarding.start()
    processes = JobProcesses(start.job)
    stopping = _Stopping(start, processes)
    process = None
    with processes:
        try:
            info = replace(JobInfo.from_environ(start.environ), errors=errors)
            process = start.start(start.command, {**start.environ, **info.to_environ()}, output, errors)
            processes.launcher = process.pid
            code = _wait(process, processes, start)
            if -code in STOPS:  # someone stopped the launcher: its ranks must still save
                stopping.stop(process, -code)
        except Stopped as stopped:
            after_echo = "\n" if sys.stderr.isatty() else ""  # of ^C
            print_stderr(f"{after_echo}stopping ({signal.Signals(stopped.number).name}){start.stop_hint}")
            stopping.stop(process, stopped.number)
            raise
        finally:
            with block_signals():
                processes.kill_all(STOP_SECONDS)
                if process:
                    process.kill()
                    process.wait()
                os.close(errors)
                forwarding.join(timeout=5)
                seek_end(1)
    return LauncherEnd(code, forwarder.ends.describe())


def _wait(process: Process, processes: JobProcesses, start: Start) -> int:
    """Wait until the launcher has ended; return its exit code.

    A watchdog reports a stalled rank on the console and by the file ``stalled``. The job is then killed here, because
    torchrun would wait 30 s for a stopped rank to react to TERM.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)  # wait(timeout) would poll 20 times a second
    waiter.start()
    while True:
        waiter.join(POLL_SECONDS)
        if not waiter.is_alive():
            return process.wait()
        # Machines may share the run dir: this start's alone counts.
        is_stalled = untrusted.read_object(start.logs / "stalled").get("job") == start.job
        if is_stalled or start.watch.finds_hang(processes):
            job_processes.send(processes.find(), signal.SIGKILL)
        processes.reap()


class HeartbeatWatch:
    """Find a hang that no watchdog can report: all ranks, or the only one, are stopped, or none has come to life.

    A thread of each rank writes ``alive-<r>`` every second, also while the rank waits: only a stopped process does not
    change the file. This machine's ranks count alone, by when this process saw their files change.
    """

    def __init__(self, job: str, logs: Path, timeout: float, first_step_timeout: float, must_start: bool) -> None:
        """Take the job's timeouts in seconds, and whether its ranks must write heartbeats."""
        self._job = job
        self._logs = logs
        self._timeout = timeout
        self._first_step_timeout = first_step_timeout
        self._must_start = must_start
        self._is_done = False
        self._changes: dict[Path, tuple[object, float]] = {}  # a file's state, and when it was first seen
        self._ranks: dict[Path, dict[str, Any]] = {}  # heartbeats of this job on this machine
        self._elsewhere: set[Path] = set()
        self._begun = time.monotonic()
        self._checked = self._begun

    def finds_hang(self, processes: JobProcesses) -> bool:
        """Return whether there is such a hang, which is reported when it is found."""
        now = time.monotonic()
        if now - self._checked < HEARTBEAT_SECONDS or self._is_done:
            return False
        if now - self._checked > PAUSE_SECONDS:
            self._begun = now
            for path in self._changes:
                self._set_changed(path, now)
        self._checked = now
        self._read(now)
        fields = self._hang(now, processes)
        if fields:
            self._is_done = True
            print_stderr(f"error: {fields['text']}")
            events.append_event(self._logs, events.HANG, source="launcher", **fields)
        return self._is_done

    def _set_changed(self, path: Path, now: float) -> None:
        state, _ = self._changes[path]
        self._changes[path] = (state, now)

    def _read(self, now: float) -> None:
        for path in set(self._logs.glob("alive-*")) - self._elsewhere:
            try:
                status = path.lstat()
            except OSError:
                continue
            state = (status.st_ino, status.st_mtime_ns, status.st_size)
            if path in self._changes and self._changes[path][0] == state:
                continue
            self._changes[path] = (state, now)
            beat = _heartbeat(path, self._job)
            if beat:
                self._add(path, beat)

    def _add(self, path: Path, beat: dict[str, Any]) -> None:
        if beat["host"] == socket.gethostname():
            self._ranks[path] = beat
        else:
            self._elsewhere.add(path)

    def _hang(self, now: float, processes: JobProcesses) -> dict[str, Any]:
        """Return the fields of a hang's event; {} if there is none."""
        limit = max(self._timeout, self._first_step_timeout, START_SECONDS)
        none_has_begun = not self._ranks and not self._elsewhere
        if self._must_start and none_has_begun and now - self._begun > limit:
            return {"text": f"no rank has written a heartbeat within {limit:g} s: see {self._logs}/launcher.log"}
        for path, beat in self._ranks.items():
            _, changed = self._changes[path]
            silent = now - changed
            if silent <= self._limit(beat) + DIAGNOSIS_SECONDS:
                continue
            if self._is_running(beat, processes):
                name = f"rank {beat['rank']} ({untrusted.shown(beat['host'])}, pid {beat['pid']})"
                text = (
                    f"{name} has written no heartbeat for {silent:.0f} s, last alive at step {beat['step']}: "
                    "its process is stopped, frozen or blocked"
                )
                return {"rank": beat["rank"], "step": beat["step"], "text": text}
            self._set_changed(path, now)
        return {}

    def _limit(self, beat: Mapping[str, Any]) -> float:
        """Return the seconds after which a rank's own watchdog reports a hang."""
        if beat["updates"] == 0 and self._first_step_timeout:
            return self._first_step_timeout
        return self._timeout

    def _is_running(self, beat: Mapping[str, Any], processes: JobProcesses) -> bool:
        """Return whether a rank has not ended. If it has, or is about to, it has removed its stacks."""
        has_stacks = (self._logs / f"stack-{beat['rank']}.txt").exists()
        return has_stacks and beat["pid"] in processes.find()


def open_log(path: Path) -> IO[bytes]:
    """Open a log file to append to, unbuffered. Raises ConfigError if it is not a regular file or cannot be written."""
    try:
        log = Root(path.parents[1]).open(f"{path.parent.name}/{path.name}", os.O_WRONLY | os.O_APPEND, mode=0o666)
        return os.fdopen(log, "ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}: name another place with --run-dir") from None


def _can_be_opened(descriptor: int) -> bool:
    """Return whether other processes can open this process's file, as `log.start` does. They cannot open a socket."""
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _StopState(enum.Enum):
    SIGNAL = "send the signal"
    WAIT = "wait until the processes have ended, or for the deadline"
    ENDED = "nothing more to wait for"


class _Stopping:
    """Stops the ranks of a job, which save and exit within ``grace`` seconds. The caller kills the rest.

    The ranks alone get the signal, because a launcher would end its ranks in its own time. All other processes get TERM
    when ranks and launcher have ended, and immediately if no rank exists. A second signal ends the wait, unless it
    repeats the first.
    """

    def __init__(self, start: Start, processes: JobProcesses) -> None:
        self._start = start
        self._processes = processes
        self._signaled: list[int] = []  # the ranks, until all have ended
        self._has_heartbeat = False
        self._deadline = 0.0

    def stop(self, process: Process | None, number: int) -> None:
        """Send the signal and wait. ``process``: the launcher, if it has been started."""
        begun = time.monotonic()
        state = _StopState.SIGNAL
        while state is not _StopState.ENDED:
            try:
                if state is _StopState.SIGNAL:
                    with block_signals():
                        self._signal_ranks(process, number)
                        state = _StopState.WAIT
                while time.monotonic() < self._deadline and self._waits_for(process):
                    time.sleep(0.05)
                state = _StopState.ENDED
            except Stopped as again:
                if again.number == signal.SIGINT or time.monotonic() > begun + REPEATED:
                    return
        if self._has_heartbeat and self._processes.find():
            grace = f"{self._start.grace:g} s (--grace)"
            print_stderr(f"killed after {grace}: steps since the last checkpoint are not saved")

    def _signal_ranks(self, process: Process | None, number: int) -> None:
        """Send the signal to the ranks, and set the deadline."""
        begun = time.monotonic()
        ranks = self._ranks_with_heartbeat()
        self._has_heartbeat = bool(ranks)
        if ranks:
            self._deadline = begun + self._start.grace + 1.0  # ranks end by themselves
        else:
            self._deadline = begun + self._start.startup_grace
            if process:
                ranks = self._start.ranks_without_heartbeat(process.pid, self._processes)
        self._send(ranks, number)

    def _send(self, ranks: list[int], number: int) -> None:
        self._signaled = ranks
        if ranks and number != signal.SIGHUP:
            job_processes.send(ranks, number)
        else:
            job_processes.send(ranks or self._processes.find(), signal.SIGTERM)

    def _waits_for(self, process: Process | None) -> bool:
        """Return whether the launcher or another process of the job has not ended."""
        left = self._processes.find()
        if process and process.poll() is None:
            return True
        if self._signaled and set(left).isdisjoint(self._signaled):
            job_processes.send(left, signal.SIGTERM)
            self._signaled = []
        return bool(left)

    def _ranks_with_heartbeat(self) -> list[int]:
        here = self._processes.find()
        host = socket.gethostname()
        beats = heartbeats(self._start.job, self._start.logs)
        return [beat["pid"] for beat in beats if beat["host"] == host and beat["pid"] in here]


def heartbeats(job: str, logs: Path) -> Iterator[dict[str, Any]]:
    """Yield the heartbeats that the job's ranks have written to ``logs``; damaged ones are left out."""
    for path in logs.glob("alive-*"):
        beat = _heartbeat(path, job)
        if beat:
            yield beat


def _heartbeat(path: Path, job: str) -> dict[str, Any]:
    """Return a heartbeat of this job; {} for another job's, and for anything that no rank writes."""
    beat = {"host": "", "pid": 0, "rank": 0, "step": 0, "updates": 0, **untrusted.read_object(path)}
    try:
        untrusted.check(beat, HEARTBEAT)
    except ValueError:
        return {}
    if beat.get("job") != job:
        return {}
    return beat


def read_text(path: Any) -> str | None:
    """Return the file's text; None if the file is missing."""
    try:
        return str(path.read_text())
    except OSError:
        return None


def print_stderr(text: str, end: str = "\n") -> None:
    """Print one line to standard error, or with another ``end`` a part of a line."""
    seek_end(2)
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def seek_end(descriptor: int) -> None:
    """Move to the end of a file of output, which rank 0 writes to through an offset of its own."""
    with contextlib.suppress(OSError):  # a terminal or a pipe has no offset
        os.lseek(descriptor, 0, os.SEEK_END)
