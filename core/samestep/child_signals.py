"""Keep the child processes of a rank alive when a stop signal reaches the whole process group.

Slurm, a terminal and ``kill -- -PGID`` signal the rank and all its children. A data loader's worker that ended would
make the rank fail before the ranks have saved a step. So each child that a rank forks, or that `multiprocessing` starts
by any method, blocks the stop signals, and a thread of the child receives them with their sender. The child obeys the
signals of its parent, such as `multiprocessing.Process.terminate`, and its own. It obeys any other when its parent has
ended.

A program inherits its signal mask from the process that executes it. So this module replaces Python's functions that
execute programs: they restore the mask, and such a program receives signals as usual. This module uses the standard
library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ORPHAN_SECONDS = 1.0  # between checks whether the parent has ended, once a signal was not obeyed
FOREVER = 1e6  # seconds
PENDING_SECONDS = 1.0  # for a child to receive a signal, before its parent sends the same one
_CONFIG_NAME = "samestep_signals"  # in the configuration that multiprocessing sends to each child

# Module state, because the signal mask that it describes is process state.
_is_installed = False
_blocks = False  # whether this process is a child that blocks the stop signals
_thread = threading.local()  # mask and pid before a fork, and whether the thread executes a program


def install() -> None:
    """Protect the children that this process starts from now on. Later calls have no effect."""
    global _is_installed
    if _is_installed or not hasattr(signal, "sigwaitinfo"):
        return
    _is_installed = True
    import multiprocessing.popen_fork
    import multiprocessing.process
    import multiprocessing.resource_tracker
    import multiprocessing.util
    import subprocess

    hooks = {"after_in_parent": _after_fork_in_parent, "after_in_child": _after_fork_in_child}
    os.register_at_fork(before=_before_fork, **hooks)
    multiprocessing.process.current_process()._config[_CONFIG_NAME] = _StartedChild()  # type: ignore[attr-defined]
    _wrap(multiprocessing.popen_fork.Popen, "_send_signal", _waiting_for_pending)
    _wrap(multiprocessing.util, "spawnv_passfds", _blocking)
    _wrap(multiprocessing.resource_tracker.ResourceTracker, "ensure_running", _keeping_mask)
    _wrap(subprocess, "_fork_exec", _executing)
    _wrap(os, "execv", _executing)
    _wrap(os, "execve", _executing)
    _wrap(os, "posix_spawn", _executing)
    _wrap(os, "posix_spawnp", _executing)
    _wrap(os, "system", _calling_shell)


def unblock() -> None:
    """Receive stop signals as usual in this process, although it may be a child of a rank."""
    global _blocks
    _blocks = False
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# --- in a child ------------------------------------------------------------------------------------------------------


def _protect(*parents: int) -> None:
    """Block the stop signals in this process, a child of a rank, and start the thread that receives them."""
    global _blocks
    _blocks = True
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_receive_signals, args=parents, name="child signals", daemon=True).start()


def _receive_signals(*parents: int) -> None:
    """Deliver the stop signals that the child obeys. ``parents`` are process ids, and `os.getppid` is the first."""
    waiting = 0  # a signal that was not obeyed, or 0
    while True:
        received = signal.sigtimedwait(STOP_SIGNALS, ORPHAN_SECONDS if waiting else FOREVER)
        number = received.si_signo if received else waiting
        is_obeyed = not _blocks or os.getppid() != parents[0]
        is_obeyed = is_obeyed or (received is not None and received.si_pid in (*parents, os.getpid()))
        if number and is_obeyed:
            _deliver(number)
            number = 0
        waiting = number


def _deliver(number: int) -> None:
    """Let a signal have its effect on this process: only the calling thread does not block it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


class _StartedChild:
    """Protects a child that multiprocessing starts by spawn or forkserver: the child receives a copy of this object."""

    def __reduce__(self) -> tuple[Callable[[int], _StartedChild], tuple[int]]:
        return _protect_started, (os.getpid(),)


def _protect_started(creator: int) -> _StartedChild:
    """Protect this process, which inherited blocked signals. A fork server is its parent, but not its ``creator``."""
    install()
    _protect(os.getppid(), creator)
    return _StartedChild()


def _waiting_for_pending(call: Callable[..., None]) -> Callable[..., None]:
    """Return a function that signals a child: one that is pending, from another sender, would replace the parent's."""

    def send_signal(popen: Any, number: int) -> None:
        deadline = time.monotonic() + PENDING_SECONDS
        while _is_pending(popen.pid, number) and time.monotonic() < deadline:
            time.sleep(0.001)
        call(popen, number)

    return send_signal


def _is_pending(pid: int, number: int) -> bool:
    """Return whether a process has not received a signal that was sent to it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        pending = next((line.split()[1] for line in file if line.startswith("ShdPnd:")), "0")
        return bool(int(pending, 16) >> (number - 1) & 1)
    return False


# --- around a fork ---------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _thread.pid = os.getpid()


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _after_fork_in_child() -> None:
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if getattr(_thread, "executes", False):  # by subprocess, with a preexec_fn
        signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)
    else:
        _protect(_thread.pid)


# --- around an exec --------------------------------------------------------------------------------------------------


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of Python, if this version of Python has it."""
    call = getattr(owner, name, None)
    if call:
        setattr(owner, name, functools.wraps(call)(wrapper(call)))


@contextlib.contextmanager
def _mask(how: int, signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    before = signal.pthread_sigmask(how, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _blocking(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts an interpreter of multiprocessing, which blocks the stop signals from its start."""

    def start(*arguments: Any) -> Any:
        with _mask(signal.SIG_BLOCK, STOP_SIGNALS):
            return call(*arguments)

    return start


def _keeping_mask(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function after which the mask is as before: Python's own unblocks TERM and INT."""

    def keep(*arguments: Any) -> Any:
        with _mask(signal.SIG_BLOCK, ()):
            return call(*arguments)

    return keep


def _executing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that executes a program without the mask of this module."""

    def execute(*arguments: Any, **keywords: Any) -> Any:
        _thread.executes = True
        try:
            with _mask(signal.SIG_UNBLOCK, STOP_SIGNALS if _blocks else ()):
                return call(*arguments, **keywords)
        finally:
            _thread.executes = False

    return execute


def _calling_shell(call: Callable[..., int]) -> Callable[..., int]:
    """Return `os.system`; in a child it waits with blocked signals."""

    def system(command: str | bytes) -> int:
        if not _blocks:
            return call(command)
        shell = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ)
        return os.waitpid(shell, 0)[1]

    return system
