"""Run a job's launcher once, show its messages, send signals to its ranks, and leave no process behind.

This module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import IO, Any, NamedTuple, Protocol

from samestep import ConfigError, NonRetryableError, env, events, untrusted
from samestep.job_info import JobInfo
from samestep.root import Root

from samestep_launch import job_processes, machine
from samestep_launch.job_processes import JobProcesses
from samestep_launch.stderr_forwarder import StderrForwarder

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # signals at which ranks save a checkpoint and exit
HANDLED = (*STOPS, signal.SIGHUP, signal.SIGQUIT)  # signals that stop the job; Ctrl-\ sends QUIT
STOP_SECONDS = 10.0  # seconds from the first signal to SIGKILL if no rank can save
# Seconds in which a second signal is ignored, unless it is Ctrl-C: Slurm signals all processes of a job step.
REPEATED = 1.0
CONSOLE_SECONDS = 0.5  # maximum seconds for which a message delays what the launch script does next
POLL_SECONDS = 0.25  # seconds between checks for a watchdog's report of a stalled rank
HEARTBEAT_SECONDS = 1.0  # seconds between checks of heartbeats; ranks write heartbeats at the same interval
DIAGNOSIS_SECONDS = 10.0  # seconds added to --timeout, so that a watchdog's more detailed report comes first
START_SECONDS = 60.0  # minimum time limit in seconds for a rank's first heartbeat, because imports are slow
# Seconds without output after which the script stops reading: a process outside the job may keep the pipe open.
OUTPUT_SECONDS = 5.0
MAX_OUTPUT_SECONDS = 600.0  # maximum seconds for which the script waits for the console after a successful job
LIMITS = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # errors because a limit of the system is reached
PAUSE_SECONDS = 5.0  # a longer gap in seconds between two checks means that this process or the machine was suspended
HEARTBEAT = {
    "host": untrusted.text(255),
    "pid": untrusted.integer(0, 2**31),
    "rank": untrusted.integer(0, 2**31),
    "step": untrusted.integer(0, 2**63),
    "updates": untrusted.integer(0, 2**63),
}


class Stopped(BaseException):
    """This process has received a signal of `HANDLED`."""

    def __init__(self, number: int) -> None:
        self.number = number


class StopSignals:
    """The handler of the signals that stop a job, and its state.

    The first signal raises Stopped. For `REPEATED` seconds after the stop began, only Ctrl-C raises Stopped again.
    """

    def __init__(self) -> None:
        self._begun: float | None = None  # time at which the stop began, on the clock `time.monotonic`
        self._blocks = 0  # number of contexts `block` that the main thread is in
        self._delayed = 0  # a signal that arrived in such a context, or 0

    def begin(self) -> None:
        """Ignore repeated signals from now on, if the stop has not begun yet."""
        if self._begun is None:
            self._begun = time.monotonic()

    def handle(self, number: int, frame: object) -> None:
        """Raise Stopped, or delay or ignore the signal. Python calls this method in the main thread."""
        is_repeated = self._begun is not None and time.monotonic() <= self._begun + REPEATED
        if is_repeated and number != signal.SIGINT:
            return
        self.begin()
        if self._blocks:
            self._delayed = number
        else:
            self._delayed = 0
            raise Stopped(number)

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Delay the signals that arrive inside this context until its end."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if self._delayed and not self._blocks:
                number = self._delayed
                self._delayed = 0
                raise Stopped(number)


stop_signals = StopSignals()  # global, because signal handlers belong to the process


def stop_on_signals() -> None:
    """Install signal handlers that raise Stopped on the signals of `HANDLED`; skip signals that are ignored."""
    for number in HANDLED:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, stop_signals.handle)


def block_signals() -> contextlib.AbstractContextManager[None]:
    """Delay the signals that arrive in the main thread inside the returned context until its end.

    A signal mask would not delay them: another thread would receive the signal, and Python would run the handler in the
    main thread.
    """
    return stop_signals.block()


def environment(info: JobInfo, nproc: int, address: str | None = None) -> dict[str, str]:
    """Return the environment of one start of the launcher and of its ranks.

    Args:
        info: values that the launch script passes to the ranks.
        nproc: number of ranks on this machine.
        address: this machine's address, from the preflight; None without a preflight.
    """
    # Another launcher may have left its variables, which would mislead this job's ranks.
    stale = env.launcher_variables()
    removed = ("PET_", "SAMESTEP_SECRET")
    environ = {}
    for name, value in os.environ.items():
        if name not in stale and not name.startswith(removed):
            environ[name] = value
    environ.update(info.to_environ())
    if not environ.get("OMP_NUM_THREADS"):
        environ["OMP_NUM_THREADS"] = str(max(1, machine.processors() // nproc))
    # Some launchers run `python` from PATH, which must be this process's interpreter.
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
        """The process id of the launcher, or of the fork server that forked the launcher."""

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the launcher's fatal signal; None while the launcher runs."""

    def wait(self) -> int:
        """Wait for the launcher's end; return the exit code, or minus the number of the launcher's fatal signal."""

    def kill(self) -> None:
        """Kill the process ``pid`` if the launcher still runs."""


# A function that starts a launcher with a command, an environment, and descriptors for standard output and error.
Starter = Callable[[Sequence[str], Mapping[str, str], int, int], Process]


def start_program(command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> Process:
    """Start a launcher as a program.

    Args:
        command: the launcher's command.
        environ: the launcher's complete environment.
        stdout: file descriptor of the launcher's standard output.
        stderr: file descriptor of the launcher's standard error.
    """
    # The launcher runs in a new session, because Ctrl-C would otherwise end the launcher before its ranks save.
    null = subprocess.DEVNULL
    return subprocess.Popen(command, env=environ, stdin=null, stdout=stdout, stderr=stderr, start_new_session=True)


class LauncherEnd(NamedTuple):
    """The end of a launcher.

    Attributes:
        code: the exit code, or minus the number of the launcher's fatal signal.
        ended_rank: text for the error message about the rank that a signal ended; "" if no signal ended a rank.
    """

    code: int
    ended_rank: str = ""


@dataclass(frozen=True)
class Start:
    """The settings of one start of a launcher.

    Attributes:
        job: name of this start, the same on all machines.
        command: the launcher's command.
        environ: the environment that `environment` returned.
        logs: the run dir's ``log`` folder.
        grace: seconds in which ranks save and exit after a signal.
        startup_grace: seconds until the kill after a signal, if no rank has written a heartbeat.
        watch: detector of a hang that no rank reports.
        line_prefix: a regular expression for the launcher's prefix of each line of a rank's stderr.
        stop_hint: text that follows "stopping (SIGTERM)" on the console.
        program: the ranks' program, if the program may have no watchdog; otherwise None. Until a rank of this program
            writes a heartbeat, the console shows all of stderr, and a stop signal goes to all ranks that `JobProcesses`
            finds.
        start: function that starts the launcher.
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
        """Return whether the launcher writes the ranks' output to files, as its command shows by the path ``logs``."""
        return any(str(self.logs) in word for word in self.command)

    def shows_stderr(self) -> bool:
        """Return whether the console shows all of stderr."""
        return self.program is not None and not any(heartbeats(self.job, self.logs))

    def ranks_without_heartbeat(self, launcher: int, processes: JobProcesses) -> list[int]:
        """Return the ids of processes that may be ranks without a watchdog; [] if ``program`` is None.

        Args:
            launcher: process id of the launcher.
            processes: the processes of the job.
        """
        if self.program is None:
            return []
        is_rank = str(self.program) == self.command[1]  # without a launcher, the command runs the program itself
        if is_rank:
            return [launcher]
        return processes.ranks(self.program)


def run_once(start: Start) -> LauncherEnd:
    """Run the launcher once, kill the job's processes that outlive the launcher, and return how the launcher ended.

    Raises:
        Stopped: a signal arrived, and this function has stopped the job.
        ConfigError: launcher.log is not regular or cannot be written.
        NonRetryableError: the launcher cannot be started.
    """
    log = open_log(start.logs / "launcher.log")
    with contextlib.suppress(OSError):  # a full disk must not end the job
        log.write(f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} {shlex.join(start.command)}\n".encode())
    # The launcher's stderr goes through this pipe. Some launchers keep their ranks' output in files, and repeat the
    # files on stdout. The stdout of these launchers goes through the pipe to the log, because the ranks open this
    # process's stdout and the pipe themselves.
    with _starting(start.command):
        messages, errors = os.pipe()
    forwarder = StderrForwarder(
        messages, log, line_prefix=start.line_prefix, shows=start.shows_stderr, show=print_stderr
    )
    forwarding = threading.Thread(target=forwarder.run, daemon=True)
    forwarding.start()
    try:
        try:
            code = _run_launcher(start, errors)
        finally:
            os.close(errors)
    except BaseException:
        with contextlib.suppress(Stopped):  # another signal ends the wait
            forwarding.join(OUTPUT_SECONDS)
        raise
    forwarding.join(OUTPUT_SECONDS)
    # If the console's reader pauses, wait until the console has all output. A signal ends this wait. After a failure,
    # the thread continues during the next start, because a console that nobody reads must not prevent a restart.
    deadline = time.monotonic() + MAX_OUTPUT_SECONDS
    while code == 0 and forwarding.is_alive() and time.monotonic() < deadline:
        if forwarder.idle_seconds() >= OUTPUT_SECONDS:
            break
        forwarding.join(OUTPUT_SECONDS)
    seek_end(1)
    return LauncherEnd(code, forwarder.ends.describe())


def _run_launcher(start: Start, errors: int) -> int:
    """Run the launcher as `run_once` does; return the exit code, or minus the number of the launcher's fatal signal.

    Args:
        start: settings of the start.
        errors: descriptor of the launcher's standard error.
    """
    output = 1
    if start.keeps_files() and _can_be_opened(1):
        output = errors
    processes = JobProcesses(start.job)
    stopping = _Stopping(start, processes)
    process = None
    with processes:
        try:
            info = replace(JobInfo.from_environ(start.environ), errors=errors)
            with _starting(start.command):
                process = start.start(start.command, {**start.environ, **info.to_environ()}, output, errors)
            processes.launcher = process.pid
            code = _wait(process, processes, start)
            if -code in STOPS:  # a stop signal ended the launcher, but its ranks must still save
                stop_signals.begin()
                stopping.stop(process, -code)
            return code
        except Stopped as stopped:
            after_echo = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C in the same line
            message = f"{after_echo}stopping ({signal.Signals(stopped.number).name}){start.stop_hint}"
            stopping.stop(process, stopped.number, message)
            raise
        finally:
            with block_signals():
                processes.kill_all(STOP_SECONDS)
                if process:
                    process.kill()
                    process.wait()


@contextlib.contextmanager
def _starting(command: Sequence[str]) -> Iterator[None]:
    """Convert an OSError inside this context, which starts ``command``.

    Raises:
        NonRetryableError: the system has too few files, processes or memory left, for example.
    """
    try:
        yield
    except OSError as error:
        remedy = ": raise the limit that ulimit -a shows, or end other programs" if error.errno in LIMITS else ""
        raise NonRetryableError(f"cannot start {command[0]}: {error.strerror}{remedy}") from None


def _wait(process: Process, processes: JobProcesses, start: Start) -> int:
    """Wait until the launcher has ended; return the exit code, or minus the number of its fatal signal.

    A watchdog reports a stalled rank on the console and by the file ``stalled``. This function then kills the job,
    because torchrun would wait 30 s for a stopped rank to react to TERM.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)  # wait(timeout) would poll 20 times a second
    waiter.start()
    is_reported = False
    while True:
        waiter.join(POLL_SECONDS)
        if not waiter.is_alive():
            return process.wait()
        stalled = untrusted.read_object(start.logs / "stalled")
        is_stalled = stalled.get("job") == start.job  # other machines or earlier starts may have written the file
        if is_stalled and not is_reported:
            is_reported = True
            _report_from_elsewhere(stalled)
        if is_stalled or start.watch.finds_hang(processes):
            job_processes.send(processes.find(), signal.SIGKILL)
        processes.reap()


def _report_from_elsewhere(stalled: Mapping[str, Any]) -> None:
    """Print the report of another machine's watchdog, whose own error may not reach this console.

    If it does, as on Slurm, the console shows the report twice.
    """
    here = socket.gethostname()
    host = stalled.get("host", here)
    if host == here:
        return
    text = f"error: no progress, reported by rank {stalled.get('rank')} on {host}: {stalled.get('culprit')}"
    print_stderr(untrusted.shown(text, limit=untrusted.MAX_LINE), limit=CONSOLE_SECONDS)


class HeartbeatWatch:
    """A detector of hangs that no rank's watchdog can report: ranks' processes are stopped, or no rank has started.

    A thread of each rank writes ``alive-<r>`` every second, also while the rank waits, so an unchanged file means a
    stopped process. The check covers this machine's ranks. The time limit begins when this process finds that the file
    has changed.
    """

    def __init__(self, job: str, logs: Path, timeout: float, first_step_timeout: float, must_start: bool) -> None:
        """Store the settings.

        Args:
            job: name of this start of the job.
            logs: the run dir's ``log`` folder.
            timeout: value of --timeout in seconds.
            first_step_timeout: time limit in seconds before a rank's first update; 0 means ``timeout``.
            must_start: whether the ranks must write heartbeats.
        """
        self._job = job
        self._logs = logs
        self._timeout = timeout
        self._first_step_timeout = first_step_timeout
        self._must_start = must_start
        self._is_done = False
        # Each file's state, and the time on the clock `time.monotonic` at which this object first read the state.
        self._changes: dict[Path, tuple[object, float]] = {}
        self._ranks: dict[Path, dict[str, Any]] = {}  # last heartbeat of each rank of this start on this machine
        self._elsewhere: set[Path] = set()
        self._begun = time.monotonic()
        self._checked = self._begun

    def finds_hang(self, processes: JobProcesses) -> bool:
        """Check the heartbeats. Return True in the call that finds and reports a hang, otherwise False."""
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
            print_stderr(f"error: {fields['text']}", limit=CONSOLE_SECONDS)
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
        """Return the fields of a hang's event; {} without a hang."""
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
        """Return whether a rank's process runs and is not about to exit: an exiting rank removes its stack file."""
        has_stacks = (self._logs / f"stack-{beat['rank']}.txt").exists()
        return has_stacks and beat["pid"] in processes.find()


def open_log(path: Path) -> IO[bytes]:
    """Open a log file for unbuffered appending.

    Raises:
        ConfigError: the file is not regular or cannot be written.
    """
    try:
        log = Root(path.parents[1]).open(f"{path.parent.name}/{path.name}", os.O_WRONLY | os.O_APPEND, mode=0o666)
        return os.fdopen(log, "ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}: name another place with --run-dir") from None


def _can_be_opened(descriptor: int) -> bool:
    """Return whether ranks can open this process's descriptor by /proc, as `log.start` does; a socket has no path."""
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _Stopping:
    """The stop of a job: ranks save and exit within ``grace`` seconds, and the caller then kills the other processes.

    Only the ranks get the signal (TERM instead of HUP and QUIT), because a launcher might kill its ranks before they
    have saved. All other processes get TERM when ranks and launcher have ended, or immediately if no rank is found. A
    second signal ends the wait.
    """

    def __init__(self, start: Start, processes: JobProcesses) -> None:
        self._start = start
        self._processes = processes
        self._signaled: list[int] = []  # process ids of signaled ranks; [] after all of them have ended
        self._has_heartbeat = False
        self._deadline = 0.0

    def stop(self, process: Process | None, number: int, message: str = "") -> None:
        """Send the signal and wait until the job's processes have ended, until the deadline, or until a second signal.

        Args:
            process: the launcher; None before the launcher's start.
            number: number of the signal.
            message: the line to print; "" for none.
        """
        with contextlib.suppress(Stopped):
            with block_signals():
                if message:
                    print_stderr(message, limit=CONSOLE_SECONDS)
                self._signal_ranks(process, number)
            while time.monotonic() < self._deadline and self._waits_for(process):
                time.sleep(0.05)
            if self._has_heartbeat and self._processes.find():
                grace = f"{self._start.grace:g} s (--grace)"
                unsaved = f"killed after {grace}: steps since the last checkpoint are not saved"
                print_stderr(unsaved, limit=CONSOLE_SECONDS)

    def _signal_ranks(self, process: Process | None, number: int) -> None:
        """Send the signal to the ranks, and set the deadline."""
        begun = time.monotonic()
        ranks = self._ranks_with_heartbeat()
        self._has_heartbeat = bool(ranks)
        if ranks:
            self._deadline = begun + self._start.grace + 1.0  # ranks exit at the end of the grace period
        else:
            self._deadline = begun + self._start.startup_grace
            if process:
                ranks = self._start.ranks_without_heartbeat(process.pid, self._processes)
        self._send(ranks, number)

    def _send(self, ranks: list[int], number: int) -> None:
        self._signaled = ranks
        if ranks and number in STOPS:
            job_processes.send(ranks, number)
        else:
            job_processes.send(ranks or self._processes.find(), signal.SIGTERM)

    def _waits_for(self, process: Process | None) -> bool:
        """Return whether a process of the job still runs.

        If the launcher and all signaled ranks have ended, the method sends TERM to the processes that are left.
        """
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
    """Yield the valid heartbeats in ``logs`` that ranks of the start ``job`` have written."""
    for path in logs.glob("alive-*"):
        beat = _heartbeat(path, job)
        if beat:
            yield beat


def _heartbeat(path: Path, job: str) -> dict[str, Any]:
    """Return the heartbeat in a file; {} if the file is invalid or belongs to another start than ``job``."""
    beat = {"host": "", "pid": 0, "rank": 0, "step": 0, "updates": 0, **untrusted.read_object(path)}
    try:
        untrusted.check(beat, HEARTBEAT)
    except ValueError:
        return {}
    if beat.get("job") != job:
        return {}
    return beat


def read_text(path: Any) -> str | None:
    """Return the file's text; None if the file cannot be read."""
    try:
        return str(path.read_text())
    except OSError:
        return None


def print_stderr(text: str, end: str = "\n", limit: float | None = None) -> None:
    """Print a line to standard error, or part of a line if ``end`` is ""; ignore write errors.

    Args:
        text: the text to print.
        end: the text to print after ``text``.
        limit: maximum seconds to wait for the console, whose reader may have stopped reading; None for no limit. After
            the limit, a thread continues to print.
    """
    if limit is not None:
        thread = threading.Thread(target=print_stderr, args=(text, end), daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no free thread; the stop is more important
            thread.start()
            thread.join(limit)
        return
    seek_end(2)
    # At its exit, Python aborts if a thread still writes to sys.stderr, so write to the descriptor.
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    left = f"{text}{end}".encode(encoding, errors="backslashreplace")
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(2, left) :]


def seek_end(descriptor: int) -> None:
    """Move a descriptor's offset to the end of its file, because rank 0 writes there through another offset."""
    with contextlib.suppress(OSError):  # a terminal or a pipe has no offset
        os.lseek(descriptor, 0, os.SEEK_END)
