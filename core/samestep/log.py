"""What happened: console, log files, progress bar, and exit codes.

``start`` gives the process's file descriptors 1 and 2 to ``<run-dir>/log/rank-<r>.log``: whatever a framework, its
C++ or a traceback prints lands there, and the console gets only what this module puts on it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from tqdm import tqdm

from samestep import FatalError, RankZeroError, RestartError, UserError, checkpoint
from samestep.env import launch_script
from samestep.signals import Stopped

# The processes of one job share one log: module state, as file descriptors are process state.
_console: IO[str] = sys.stdout
_console_errors: IO[str] = sys.stderr
_folder: Path | None = None
_rank = 0
_quiet = False
_bar: tqdm[Any] | None = None


def start(run_dir: Path, rank: int, quiet: bool) -> None:
    """Open ``log/rank-<r>.log`` and send all further output of this process there, but for this module's.

    Only the first call of a process does so; it may come before or after the rendezvous.
    """
    global _console, _console_errors, _folder, _rank, _quiet
    if _folder is not None:
        return
    _rank, _quiet, _folder = rank, quiet, run_dir.resolve() / "log"
    # The launch script's own stdout, and the pipe by which it takes in what goes wrong: launchers put a pipe or a file
    # between (horovodrun prefixes each line; Paddle and msrun keep it all in files of theirs). With these a terminal
    # stays one, the last line is the result, and errors are told at once.
    _console = os.fdopen(_launch_scripts_file(1, 1), "w", buffering=1)
    _console_errors = os.fdopen(_launch_scripts_file(os.environ.get("SAMESTEP_ERRORS"), 2), "w", buffering=1)
    _folder.mkdir(parents=True, exist_ok=True)
    file = os.open(_folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what is printed must not be lost in a buffer when the process ends
        sys.stdout.reconfigure(line_buffering=True)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    _to_file(f"rank {rank} on {socket.gethostname()}, pid {os.getpid()}: {' '.join(sys.argv)}")


def _launch_scripts_file(its: int | str | None, mine: int) -> int:
    """File descriptor ``its`` of the launch script, opened; a copy of ``mine`` where that cannot be had."""
    try:
        path = f"/proc/{launch_script(os.environ)}/fd/{its}"
        if not os.path.samestat(os.stat(path), os.fstat(mine)):
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    except OSError:  # no launch script, another machine, or not Linux
        pass
    return os.dup(mine)


def info(text: str) -> None:
    """Say something: every rank to its file, rank 0 also to the console."""
    _to_file(text)
    if _rank == 0 and not _quiet:
        _to_console(_console, text)


def warning(text: str) -> None:
    """Say something that the user should see, on the console's standard error."""
    _to_file(f"warning: {text}")
    _to_console(_console_errors, f"warning: {text}")


def error(text: str) -> None:
    """Name a failure in one line on the console's standard error."""
    line = " ".join(text.split())
    _to_console(_console_errors, f"error: {line}")  # before the file, which may be on the disk that hangs
    _to_file(f"error: {line}")


def first_line(message: str) -> str:
    """The first line of a message that is not blank."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def run(main: Callable[[], None], headline: Callable[[str], str] = first_line) -> None:
    """Run a program and exit as every app does: 0 done, 2 the caller's mistake, 128 + a signal, 1 anything else.

    ``headline`` gives what the console shows of an unknown failure's message: frameworks differ in how they write one.

    Every process leaves by ``os._exit``. A failed one, because a framework's orderly end would wait for ranks that are
    gone; a finished one, because threads that a framework left behind (gloo's, even after its group was destroyed) now
    and then abort a process while its interpreter shuts down, and the job would count as failed. So nothing is run at
    exit: a program closes what it opened before it returns.
    """
    try:
        try:
            main()
        finally:
            checkpoint.finish()  # whatever happened after it
        for stream in (sys.stdout, sys.stderr, _console, _console_errors):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(0)
    except (UserError, FatalError) as problem:
        error(str(problem))
        code = 2 if isinstance(problem, UserError) else 1
    except RestartError as problem:
        error(str(problem))
        os._exit(1)
    except RankZeroError as problem:
        code = problem.exit_code
    except Stopped as stopped:
        leave(stopped, stopped.stands)
    except KeyboardInterrupt:
        _to_file("interrupted")
        os._exit(128 + signal.SIGINT)
    except Exception as problem:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        where = f"; more in {_folder / f'rank-{_rank}.log'}" if _folder else ""
        from samestep import hang  # not before something has failed

        died = hang.crashes(_folder, os.environ.get("SAMESTEP_JOB", ""))
        error(f"rank {_rank}: {type(problem).__name__}: {headline(str(problem))}{died}{where}")
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(1)
    no_restart(code)
    os._exit(code)


def leave(stopped: Stopped, stands: bool) -> NoReturn:
    """End this process, from any thread, as it was asked to; ``stands``: it is not to be started again.

    What is said may not hold it up: the main thread may be writing to a pipe that nobody reads, or a disk that hangs.
    """
    from samestep.watchdog import within

    if stands:
        within(1.0, no_restart, stopped.exit_code)
    within(1.0, info, str(stopped))
    os._exit(stopped.exit_code)


def no_restart(code: int) -> None:
    """Tell the launch script that starting again cannot help, and the exit code that says why."""
    if _folder:
        temporary = _folder / f".no-restart.{_rank}.tmp"  # all ranks may fail at once
        try:
            temporary.write_text(json.dumps({"code": code, "job": os.environ.get("SAMESTEP_JOB")}))
            temporary.replace(_folder / "no-restart")
        except OSError as problem:
            _to_file(f"warning: {problem}")


def progress(total: int, done: int) -> tqdm[Any]:
    """A progress bar over steps, shown by rank 0 on a terminal alone."""
    global _bar
    hide = _rank != 0 or _quiet or not _console.isatty()
    _bar = tqdm(total=total, initial=done, unit="step", file=_console, disable=hide, leave=False, dynamic_ncols=True)
    return _bar


def result(text: str) -> None:
    """Print ``RESULT <text>``, the last line on stdout, also where all else is quiet. Rank 0 alone calls this."""
    _to_file(f"RESULT {text}")
    _to_console(_console, f"RESULT {text}")


def _to_file(text: str) -> None:
    if _folder:
        with contextlib.suppress(OSError):  # a full disk must not hide the error that is being told
            print(time.strftime("%Y-%m-%dT%H:%M:%S"), text, file=sys.stderr, flush=True)


def _to_console(stream: IO[str], text: str) -> None:
    with contextlib.suppress(OSError):  # the console may be gone (`| head` has ended); the log file has the line
        if _bar is not None and not _bar.disable:
            _bar.clear()
        stream.write(text + "\n")  # one write, so that the lines of several ranks do not mix
        stream.flush()
