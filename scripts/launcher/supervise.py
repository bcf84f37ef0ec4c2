"""How a job begins and ends: one start of its launcher, what that says, signals, and that nothing of it is left.

It uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # what a rank answers by a checkpoint
STOP_SECONDS = 10.0  # from the first signal to SIGKILL, where no rank can save
REPEATED = 1.0  # seconds in which another signal is the same one, but Ctrl-C: Slurm, say, signals all of a step
POLL_SECONDS = 0.25  # between looks whether a watchdog has named a stalled rank


class Stopped(BaseException):
    """INT, TERM, USR1 or HUP came in."""

    def __init__(self, number: int) -> None:
        self.number = number


def stop_on_signals() -> None:
    """INT, TERM, USR1 and HUP raise Stopped from here on."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(number)

    for number in (*STOPS, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP: so do we
            signal.signal(number, stop)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Signals that come in here are heard behind it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*STOPS, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment(job: str, nproc: int, node_count: int, attempt: int, address: str | None = None) -> dict[str, str]:
    """What one start of the launcher and its ranks find in their environment.

    ``job`` is new each time, and the same on all machines; ``address`` is this one's, by which the others see it.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    environ.update(
        SAMESTEP_JOB=job,
        SAMESTEP_LAUNCHER=f"{os.getpid()}@{socket.gethostname()}",
        SAMESTEP_RESTARTS=str(attempt),
    )
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _processors() // nproc)))
    # Some launchers call `python` by name: as in an activated environment, that is this one.
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    # What was asked for: a rank that finds another number has lost others. Each machine may have another N.
    environ |= {"SAMESTEP_RANKS": str(nproc)} if node_count == 1 else {"SAMESTEP_MACHINES": str(node_count)}
    # gloo would listen on the address of the host's name, which may be none that other machines reach.
    if name := _interface("127.0.0.1" if node_count == 1 else address):
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return environ


def run_once(
    command: Sequence[str],
    environ: Mapping[str, str],
    logs: Path,
    line_prefix: str = "",
    stop_hint: str = "",
    grace: float = STOP_SECONDS,
) -> int:
    """One start of the launcher; returns its exit code when all of the job's processes have ended.

    ``environ`` is of `environment`. ``line_prefix`` is a regular expression: what the launcher puts before each line of
    a rank's stderr. ``stop_hint`` is said to who stops the job; its ranks then have ``grace`` seconds to save and end.
    """
    job, log_file = environ["SAMESTEP_JOB"], logs / "launcher.log"
    with log_file.open("ab") as log:
        log.write(f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} {shlex.join(command)}\n".encode())
    # What the launcher says comes through this pipe; ranks whose launcher keeps their output in files open it too, and
    # this process's stdout. Such a launcher (its command names the logs' folder) then repeats on its own stdout what it
    # finds in those files: that is for the log.
    messages, errors = os.pipe()
    keeps_files = any(str(logs) in word for word in command) and _can_be_opened(1)
    pump = threading.Thread(target=_pump, args=(os.fdopen(messages, "rb"), log_file, line_prefix), daemon=True)
    pump.start()
    process = None
    try:
        # A session of its own: Ctrl-C reaches this process alone, which then stops all others in order.
        process = subprocess.Popen(
            command,
            env={**environ, "SAMESTEP_ERRORS": str(errors)},
            stdin=subprocess.DEVNULL,
            stdout=errors if keeps_files else None,
            stderr=errors,
            start_new_session=True,
        )
        code = _wait(process, job, logs / "stalled")
        if -code in STOPS:  # someone stopped the launcher: its ranks are still to save
            _stop_ranks(job, process, -code, logs, grace)
    except Stopped as stopped:
        after_echo = "\n" if sys.stderr.isatty() else ""  # of ^C
        say(f"{after_echo}stopping ({signal.Signals(stopped.number).name}){stop_hint}")
        _stop_ranks(job, process, stopped.number, logs, grace)
        raise
    finally:
        with _deaf():
            _kill_all(job)
            if process:
                process.wait()
            os.close(errors)
            pump.join(timeout=5)
            _to_the_end(1)
    return code


def _wait(process: subprocess.Popen[bytes], job: str, stalled: Path) -> int:
    """The launcher's exit code, when it has ended.

    When a watchdog has named a stalled rank, which it does on the console and then by the file ``stalled``, the job is
    ended here: torchrun would wait 30 s for a rank that is stopped to answer its TERM.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)  # wait(timeout) itself would look 20 times a second
    waiter.start()
    while True:
        waiter.join(POLL_SECONDS)
        if not waiter.is_alive():
            return process.wait()
        if job in (read_text(stalled) or ""):  # machines may share the run dir: of this start
            _kill(_processes_of(job), signal.SIGKILL)


def _pump(stream: IO[bytes], log_file: Path, line_prefix: str) -> None:
    """The launcher's and the ranks' stderr: all of it into the log, our own one-line messages on the console too."""
    prefix = re.compile(line_prefix.encode())
    shown = set()
    with stream, log_file.open("ab", buffering=0) as log:
        for line in stream:
            with contextlib.suppress(OSError):
                log.write(line)
            found = prefix.match(line)
            line = line[found.end() :] if found else line
            if line.startswith((b"error: ", b"warning: ")) and line not in shown:  # what all ranks say is said once
                shown.add(line)
                say(line.decode(errors="replace").rstrip())


def _can_be_opened(descriptor: int) -> bool:
    """Whether other processes can open this one's file, as `log.start` does: a socket, say, they cannot."""
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _stop_ranks(job: str, process: subprocess.Popen[bytes] | None, number: int, logs: Path, grace: float) -> None:
    """The signal to the ranks of the job alone, which save and end; KILL to what remains after ``grace`` seconds.

    Never to their launcher, which would end them in its own time. Where no rank is alive yet, TERM to all there is.
    """
    ranks: list[int] | None = None
    begun = deadline = time.monotonic()
    while True:
        try:
            if ranks is None:
                with _deaf():
                    ranks = _ranks_of(job, logs)
                    deadline += grace + 1.0 if ranks else min(grace, STOP_SECONDS)  # ranks end by themselves
                    told = number if ranks and number != signal.SIGHUP else signal.SIGTERM
                    _kill(ranks or _processes_of(job), told)
            while time.monotonic() < deadline and ((process and process.poll() is None) or _processes_of(job)):
                time.sleep(0.05)
            break
        except Stopped as again:  # at once
            if again.number == signal.SIGINT or time.monotonic() > begun + REPEATED:
                return
    if ranks and _processes_of(job):
        say(f"killed after {grace:g} s (--grace): steps since the last checkpoint are not saved")


def _ranks_of(job: str, logs: Path) -> list[int]:
    """The job's ranks on this machine, by their heartbeats."""
    here, found = _processes_of(job), []
    for path in logs.glob("alive-*"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            its = json.loads(path.read_text())
            if its["job"] == job and its["host"] == socket.gethostname() and its["pid"] in here:
                found.append(int(its["pid"]))
    return found


def _processes_of(job: str) -> list[int]:
    """This script's processes of a job, by their environment, whoever their parent is by now.

    Another script's may be on this machine too, which stands for another machine.
    """
    marks = {f"SAMESTEP_JOB={job}".encode(), f"SAMESTEP_LAUNCHER={os.getpid()}@{socket.gethostname()}".encode()}
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environ = entry.read_bytes()
            if marks <= set(environ.split(b"\0")) or (not environ and _is_starting_child(entry.with_name("stat"))):
                found.append(int(entry.parent.name))
    return found


def _is_starting_child(stat: Path) -> bool:
    """Of a process without an environment: a child of this one, in the middle of its exec, which will have one.

    `subprocess.Popen` returns so early that a launcher may still be there when a signal comes right behind it.
    """
    state, parent, *_ = stat.read_text().rpartition(")")[2].split()  # after the name, which may hold spaces: proc(5)
    return state not in "ZX" and int(parent) == os.getpid()


def _kill_all(job: str) -> None:
    """KILL to every process of the job, and wait until the last is gone: none may write while the next start runs.

    Only a second look counts that finds none: the first may have come while a rank had no environment, in its exec.
    """
    deadline, looks = time.monotonic() + STOP_SECONDS, 0
    while looks < 2 and time.monotonic() < deadline:
        left = _processes_of(job)
        looks = 0 if left else looks + 1
        _kill(left, signal.SIGKILL)
        time.sleep(0.02)


def _kill(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@contextlib.contextmanager
def reserved_port(given: int | None) -> Iterator[int]:
    """``given``; or a free port on loopback, kept from other jobs of this program by a lock until the job ends."""
    if given:
        yield given
        return
    # One byte of a common file is locked for each port; the kernel frees it with the process. These ports are below
    # those that a kernel gives to connections, which could take one before the launcher listens on it.
    with Path(tempfile.gettempdir(), f"samestep-ports-{os.getuid()}.lock").open("ab") as locks:
        while True:
            port = random.randrange(20_000, 32_768)
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                if port_is_free(port):
                    break
        yield port


def port_is_free(port: int) -> bool:
    """Whether this machine can listen there, on all of its addresses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _interface(address: str | None) -> str | None:
    """The name of this machine's network interface that has an IPv4 address; None where that cannot be told."""
    if address is None or address.startswith("127."):
        return address and ("lo0" if sys.platform == "darwin" else "lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # SIOCGIFADDR, netdevice(7): a struct ifreq, its address at byte 20
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", os.fsencode(name)[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _processors() -> int:
    """The processors this job may use: on a shared machine fewer than it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_text(path: Path) -> str | None:
    """None where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return None


def say(text: str) -> None:
    """One line on standard error."""
    _to_the_end(2)
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _to_the_end(descriptor: int) -> None:
    """Where output goes to a file, rank 0 writes to it through an offset of its own: go on behind what it wrote."""
    with contextlib.suppress(OSError):  # a terminal or a pipe has no offset
        os.lseek(descriptor, 0, os.SEEK_END)
