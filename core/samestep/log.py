"""Write to the console and the log files, show progress, and set exit codes.

`start` redirects file descriptors 1 and 2 to ``<run-dir>/log/rank-<r>.log``. This file gets tracebacks and all output
of a framework, including output of its C++ code. Only this module writes to the console.
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

for _name in ("stdin", "stdout", "stderr"):  # otherwise the next opened file gets a closed stream's descriptor
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "r+", errors="backslashreplace"))

# These variables are global because a process has one console and one log file.
_console: IO[str] = sys.stdout
_console_errors: IO[str] = sys.stderr
_folder: Path | None = None
_file: Path | None = None  # the log file; None before `start`
_rank = 0
_quiet = False
places = False  # whether a line of the file is `level|time|path|line| text` instead of `time text`
remedies: list[Callable[[str], str]] = []  # functions that return a remedy for an exception's message, or ""
_bar: tqdm[Any] | None = None
_monitor = Monitor()


def start(run_dir: Path, rank: int, quiet: bool, monitor: Monitor | None = None) -> None:
    """Redirect all further output of this process, except lines for the console, to ``log/rank-<r>.log``.

    Only the first call in a process has an effect. This call may come before or after the rendezvous.

    Args:
        run_dir: folder of the run.
        rank: rank of this process.
        quiet: whether the console shows only results, warnings and errors.
        monitor: the monitor that records errors as events and describes crashes of other ranks.

    Raises:
        NonRetryableError: the log file cannot be opened.
    """
    global _console, _console_errors, _folder, _file, _rank, _quiet, _monitor
    if _folder is not None:
        return
    _rank = rank
    _quiet = quiet
    _folder = run_dir.resolve() / "log"
    _monitor = monitor or _monitor
    # Launchers put a pipe or a file between the rank and the launch script: horovodrun prefixes each line, and Paddle
    # and msrun write files. Therefore ranks write to the launch script's own descriptors, so that `isatty` detects a
    # terminal and the result is the last line.
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
    """Open the launch script's descriptor ``number`` for writing text, and return the stream.

    If this fails, or if this process's descriptor ``fallback`` is the same file, duplicate ``fallback`` instead.
    """
    descriptor = None
    with contextlib.suppress(OSError):  # for systems without /proc, or machines without a launch script
        path = f"/proc/{_job_info().launch_script()}/fd/{number}"
        if not os.path.samestat(os.stat(path), os.fstat(fallback)):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    return os.fdopen(descriptor or os.dup(fallback), "w", buffering=1, errors="backslashreplace")


def info(text: str) -> None:
    """Log a line to this rank's file. On rank 0, also print the line on the console, unless --quiet is set."""
    _to_file(text)
    if _rank == 0 and not _quiet:
        _to_console(_console, text)


def warning(text: str, kind: str = "") -> None:
    """Log a warning in one line to the file and the console's standard error. With ``kind``, also record an event."""
    line = untrusted.shown(text, limit=untrusted.MAX_LINE)
    if kind:
        _monitor.record_event(kind, text=line)
    _to_file(f"warning: {line}")
    _to_console(_console_errors, f"warning: {line}")


def error(text: str, kind: str = events.FAILURE, event_text: str = "", **fields: Any) -> None:
    """Report a failure in one line on the console's standard error, in the file, and as an event.

    Args:
        text: the message.
        kind: kind of the event, one of `events.KINDS`.
        event_text: the event's text; by default ``text``.
        **fields: further JSON values of the event.
    """
    line = untrusted.shown(text, limit=untrusted.MAX_LINE)
    _to_console(_console_errors, f"error: {line}")  # print to the console first, because the disk may hang
    _to_file(f"error: {line}")
    _monitor.record_event(kind, text=event_text or line, **fields)


def first_line(message: str) -> str:
    """Return the first nonblank line of a message, or ""."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def run(main: Callable[[], None], summarize_error: Callable[[str], str] = first_line) -> None:
    """Run a program, and exit with 0 (done), 2 (mistake of the caller), 128 + signal, or 1 (any other failure).

    Every process exits by ``os._exit``, because a framework's orderly shutdown would wait for ranks that have ended.
    Also, gloo's threads sometimes abort a process at its exit. Therefore exit functions do not run, and a program must
    close its files before it returns.

    Args:
        main: the program.
        summarize_error: function that shortens the message of an unknown exception to one line for the console.
    """
    try:
        try:
            main()
        except BaseException:
            checkpoint.process_fails.set()
            raise
        finally:
            checkpoint.finish()  # waits for the last checkpoint, even after a failure
        _flush(sys.stdout, sys.stderr, _console, _console_errors)
        os._exit(0)
    except (ConfigError, NonRetryableError) as problem:
        error(str(problem))
        code = problem.exit_code
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
    """Write the traceback of an exception to the log file, and report the exception in one line."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
    where = f"; more in {_file}" if _file else ""
    summary = f"{type(problem).__name__}: {summarize_error(str(problem))}"
    summary += "".join(remedy(str(problem)) for remedy in remedies)
    _record_failure(problem, f"rank {_rank}: {summary}")
    event_text = ""
    if failures.is_lost_connection(problem):  # the event omits the framework's message, which has paths of source files
        event_text = f"rank {_rank}: lost the connection to another rank{where}"
    error(f"rank {_rank}: {summary}{_monitor.describe_crashes()}{where}", event_text=event_text)
    _flush(sys.stderr)


def _flush(*streams: IO[str]) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.flush()


def exit_process(stopped: Stopped, is_final: bool) -> NoReturn:
    """Exit with the code of a stop signal, from any thread.

    If ``is_final``, the launch script does not restart the job. Each write has a timeout, because the console may be a
    pipe that no process reads, and a disk may hang.
    """
    if is_final:
        call_with_timeout(1.0, no_restart, stopped.exit_code)
    call_with_timeout(1.0, info, str(stopped))
    if _rank == 0:
        call_with_timeout(1.0, lambda: _monitor.record_event(events.SIGNAL, text=str(stopped)))
    os._exit(stopped.exit_code)


def call_with_timeout(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``call``, or None if the call raises or exceeds the limit, so that a rank can always exit.

    Args:
        seconds: maximum seconds to wait.
        call: function to call in a thread.
        *arguments: arguments of the call.
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
    """Write ``log/no-restart``, so that the launch script exits with ``code`` instead of restarting the job."""
    folder = _job_folder()
    if folder:
        job = _job_info().job
        untrusted.write_json(folder, "no-restart", {"code": code, "job": job or None}, _rank)


def _record_failure(problem: Exception, line: str) -> None:
    """Record the failure for the launch script, if the step is known."""
    folder = _job_folder()
    job = _job_info().job
    if folder and job and _monitor.step is not None:
        failures.record(folder, job, _rank, _monitor.step, problem, line)


def _job_folder() -> Path | None:
    """Return the log folder, or None if it is unknown. With a launch script, the folder is known before `start`."""
    info = _job_info()
    if _folder is None and info.run_dir and info.job:
        return Path(info.run_dir, "log")
    return _folder


def _job_info() -> JobInfo:
    """Return the launch script's job information; the defaults if it is missing or damaged.

    The option parser reports the damage.
    """
    with contextlib.suppress(ConfigError):
        return JobInfo.from_environ(os.environ)
    return JobInfo()


def progress(total: int, done: int) -> tqdm[Any]:
    """Return a progress bar over steps. Only rank 0 shows the bar, on a terminal and without --quiet."""
    global _bar
    hide = _rank != 0 or _quiet or not _console.isatty()
    _bar = tqdm(total=total, initial=done, unit="step", file=_console, disable=hide, leave=False, dynamic_ncols=True)
    return _bar


def result(text: str) -> None:
    """Print ``RESULT <text>`` as the last line on stdout, also with --quiet. Only rank 0 calls this function."""
    _to_file(f"RESULT {text}")
    _to_console(_console, f"RESULT {text}")


def _to_file(text: str) -> None:
    if _file:
        head = time.strftime("%Y-%m-%dT%H:%M:%S")
        caller = sys._getframe(2)  # the frame that called this module's function
        if places:
            level = {"warning": "WARNING", "error": "ERROR"}.get(text.partition(":")[0], "INFO")
            head = f"{level}|{head}|{caller.f_code.co_filename}|{caller.f_lineno}|"
        with contextlib.suppress(OSError):  # a full disk must not hide the error that is being reported
            print(head, text, file=sys.stderr, flush=True)


def _to_console(stream: IO[str], text: str) -> None:
    with contextlib.suppress(OSError):  # the console may be closed (`| head` has ended); the log file has the line
        if _bar is not None and not _bar.disable:
            _bar.clear()
        # Write all lines in one call, so that the lines of several ranks do not mix.
        stream.write("".join(f"{untrusted.printable(line)}\n" for line in text.split("\n")))
        stream.flush()
