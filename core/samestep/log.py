"""Write to the console and the log files, show progress, and set exit codes.

`start` redirects file descriptors 1 and 2 to ``<run-dir>/log/rank-<r>.log``: the output of a framework,
its C++ or a traceback goes there. Only this module writes to the console.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from tqdm import tqdm

from samestep import (
    ConfigError,
    NonRetryableError,
    RemoteRankError,
    RetryableError,
    checkpoint,
    events,
    failures,
    untrusted,
)
from samestep.job_info import JobInfo
from samestep.monitor import Monitor
from samestep.root import Root
from samestep.stop import Stopped

for _name in ("stdin", "stdout", "stderr"):  # the next file that is opened would get a closed one's number
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "r+", errors="backslashreplace"))

# Module state, because the file descriptors that it describes are process state.
_console: IO[str] = sys.stdout
_console_errors: IO[str] = sys.stderr
_folder: Path | None = None
_file: Path | None = None  # once this process writes to it
_rank = 0
_quiet = False
places = False  # whether a line of the file is `level|time|path|line| text` instead of `time text`
remedies: list[Callable[[str], str]] = []  # a framework's own, for the message of an unknown failure; "" if none helps
_bar: tqdm[Any] | None = None
_monitor = Monitor()


def start(run_dir: Path, rank: int, quiet: bool, monitor: Monitor | None = None) -> None:
    """Open ``log/rank-<r>.log`` and send all further output of this process there, except this module's.

    Only the first call of a process has an effect; it may come before or after the rendezvous. ``monitor`` records
    errors as events, and describes crashes of other ranks.

    Args:
        run_dir: folder of the run.
        rank: rank of this process.
        quiet: whether the console shows results and errors only.
        monitor: records errors as events, and describes crashes of other ranks.
    """
    global _console, _console_errors, _folder, _file, _rank, _quiet, _monitor
    if _folder is not None:
        return
    _rank = rank
    _quiet = quiet
    _folder = run_dir.resolve() / "log"
    _monitor = monitor or _monitor
    # Launchers put a pipe or a file between the rank and the launch script (horovodrun prefixes each line; Paddle and
    # msrun write files). The launch script's own files keep a terminal a terminal and the result the last line.
    _console = _open_launch_script_file(1, 1)
    _console_errors = _open_launch_script_file(_job_info().errors, 2)
    path = _folder / f"rank-{rank}.log"
    with checkpoint.writing(path):
        root = Root(_folder.parent)
        root.make_folder(_folder.name)
        file = root.open(f"{_folder.name}/{path.name}", os.O_WRONLY | os.O_APPEND)
    if isinstance(sys.stdout, io.TextIOWrapper):  # printed text must not stay in a buffer when the process ends
        sys.stdout.reconfigure(line_buffering=True)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    _file = path
    _to_file(f"rank {rank} on {socket.gethostname()}, pid {os.getpid()}: {' '.join(sys.argv)}")


def _open_launch_script_file(number: int | None, fallback: int) -> IO[str]:
    """Open the launch script's file of this number, or this process's ``fallback`` if that is impossible."""
    descriptor = None
    with contextlib.suppress(OSError):  # no launch script, another machine, or not Linux
        path = f"/proc/{_job_info().launch_script()}/fd/{number}"
        if not os.path.samestat(os.stat(path), os.fstat(fallback)):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    return os.fdopen(descriptor or os.dup(fallback), "w", buffering=1, errors="backslashreplace")


def info(text: str) -> None:
    """Log a line: every rank to its file, rank 0 also to the console."""
    _to_file(text)
    if _rank == 0 and not _quiet:
        _to_console(_console, text)


def warning(text: str, kind: str = "") -> None:
    """Log a warning in one line to the file and to the console's standard error; with a ``kind`` also as an event."""
    line = untrusted.shown(text, limit=untrusted.MAX_LINE)
    if kind:
        _monitor.record_event(kind, text=line)
    _to_file(f"warning: {line}")
    _to_console(_console_errors, f"warning: {line}")


def error(text: str, kind: str = events.FAILURE, event_text: str = "", **fields: Any) -> None:
    """Report a failure in one line on the console's standard error, in the file, and as an event of this kind.

    Args:
        text: one line.
        kind: one of `events.KINDS`.
        event_text: the event's text; by default ``text``.
        **fields: further JSON values of the event.
    """
    line = untrusted.shown(text, limit=untrusted.MAX_LINE)
    _to_console(_console_errors, f"error: {line}")  # first, because the file's disk may hang
    _to_file(f"error: {line}")
    _monitor.record_event(kind, text=event_text or line, **fields)


def first_line(message: str) -> str:
    """Return the first line of a message that is not blank."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def run(main: Callable[[], None], summarize_error: Callable[[str], str] = first_line) -> None:
    """Run a program and exit: 0 done, 2 a mistake of the caller, 128 + a signal, 1 anything else.

    ``summarize_error`` shortens the message of an unknown failure to the console's line; frameworks differ in format.

    Every process exits by ``os._exit``. The orderly shutdown of a framework would wait for ranks that are gone, and
    threads that a framework leaves behind (gloo's) sometimes abort a finished process. So nothing runs at exit: a
    program must close its files before it returns.
    """
    try:
        try:
            main()
        except BaseException:
            checkpoint.process_fails.set()
            raise
        finally:
            checkpoint.finish()  # also after a failure
        _flush(sys.stdout, sys.stderr, _console, _console_errors)
        os._exit(0)
    except ConfigError as problem:
        error(str(problem))
        code = 2
    except NonRetryableError as problem:
        error(str(problem))
        code = 1
    except RetryableError as problem:
        _record_failure(problem, problem.repeated)
        error(str(problem), events.ROLLBACK)
        os._exit(1)
    except RemoteRankError as problem:
        code = problem.exit_code
    except Stopped as stopped:
        exit_process(stopped, stopped.is_final)
    except KeyboardInterrupt:
        _to_file("interrupted")
        os._exit(128 + signal.SIGINT)
    except Exception as problem:
        _report_unknown(problem, summarize_error)
        os._exit(1)
    no_restart(code)
    os._exit(code)


def _report_unknown(problem: Exception, summarize_error: Callable[[str], str]) -> None:
    """Write the traceback to the log file, and report the exception in one line."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
    where = f"; more in {_file}" if _file else ""
    summary = f"{type(problem).__name__}: {summarize_error(str(problem))}"
    summary += "".join(remedy(str(problem)) for remedy in remedies)
    _record_failure(problem, f"rank {_rank}: {summary}")
    event_text = ""
    if failures.is_lost_connection(problem):  # a framework's message names files of its own source
        event_text = f"rank {_rank}: lost the connection to another rank{where}"
    error(f"rank {_rank}: {summary}{_monitor.describe_crashes()}{where}", event_text=event_text)
    _flush(sys.stderr)


def _flush(*streams: IO[str]) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.flush()


def exit_process(stopped: Stopped, is_final: bool) -> NoReturn:
    """Exit as requested, from any thread. If ``is_final``, the launch script must not restart the job.

    No write may delay the exit: the main thread may hold a pipe that nobody reads, or wait for a disk that hangs.
    """
    if is_final:
        call_with_timeout(1.0, no_restart, stopped.exit_code)
    call_with_timeout(1.0, info, str(stopped))
    if _rank == 0:
        call_with_timeout(1.0, lambda: _monitor.record_event(events.SIGNAL, text=str(stopped)))
    os._exit(stopped.exit_code)


def call_with_timeout(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``call``, or None if it takes longer or raises, so that a rank can always exit.

    Args:
        seconds: limit.
        call: called in a thread.
        *arguments: of the call.
    """
    results: list[Any] = []

    def target() -> None:
        with contextlib.suppress(Exception):
            results.append(call(*arguments))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def no_restart(code: int) -> None:
    """Write ``log/no-restart``: a restart cannot help, and the launch script must exit with ``code``."""
    folder = _job_folder()
    if folder:
        job = _job_info().job
        untrusted.write_json(folder, "no-restart", {"code": code, "job": job or None}, _rank)


def _record_failure(problem: Exception, line: str) -> None:
    """Note the failure for the launch script, if the monitor knows the step."""
    folder = _job_folder()
    job = _job_info().job
    if folder and job and _monitor.step is not None:
        failures.record(folder, job, _rank, _monitor.step, problem, line)


def _job_folder() -> Path | None:
    """Return the log folder, also before `start`, if a launch script started this process; else None."""
    info = _job_info()
    if _folder is None and info.run_dir and info.job:
        return Path(info.run_dir, "log")
    return _folder


def _job_info() -> JobInfo:
    """Return what the launch script has passed on; a damaged document, which the options report, counts as none."""
    with contextlib.suppress(ConfigError):
        return JobInfo.from_environ(os.environ)
    return JobInfo()


def progress(total: int, done: int) -> tqdm[Any]:
    """Return a progress bar over steps. Only rank 0 shows it, and only on a terminal."""
    global _bar
    hide = _rank != 0 or _quiet or not _console.isatty()
    _bar = tqdm(total=total, initial=done, unit="step", file=_console, disable=hide, leave=False, dynamic_ncols=True)
    return _bar


def result(text: str) -> None:
    """Print ``RESULT <text>``, the last line on stdout, also with --quiet. Only rank 0 calls this."""
    _to_file(f"RESULT {text}")
    _to_console(_console, f"RESULT {text}")


def _to_file(text: str) -> None:
    if _file:
        head = time.strftime("%Y-%m-%dT%H:%M:%S")
        caller = sys._getframe(2)  # outside of this module
        if places:
            level = {"warning": "WARNING", "error": "ERROR"}.get(text.partition(":")[0], "INFO")
            head = f"{level}|{head}|{caller.f_code.co_filename}|{caller.f_lineno}|"
        with contextlib.suppress(OSError):  # a full disk must not hide the error that is being reported
            print(head, text, file=sys.stderr, flush=True)


def _to_console(stream: IO[str], text: str) -> None:
    with contextlib.suppress(OSError):  # the console may be gone (`| head` has ended); the log file has the line
        if _bar is not None and not _bar.disable:
            _bar.clear()
        # One write, so that the lines of several ranks do not mix.
        stream.write("".join(f"{untrusted.printable(line)}\n" for line in text.split("\n")))
        stream.flush()
