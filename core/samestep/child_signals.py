"""Keep the child processes of a rank alive when a stop signal reaches the process group.

Slurm, a terminal and ``kill -- -PGID`` send signals to the rank and all its children. If the signal ended a data
loader's worker, its rank would fail before the ranks have saved a checkpoint. Therefore each child that a rank forks,
or that `multiprocessing` starts by any method, blocks the stop signals. A thread of the child receives each signal and
the process id of its sender. Signals from the child's parent (as by `multiprocessing.Process.terminate`) and from the
child itself take effect. Signals from other processes take effect once the parent has ended.

A program inherits its signal mask from the process that executes it. Therefore this module wraps Python's functions
that execute programs, so that such programs start with the original mask. This module uses the standard library only.
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
ORPHAN_SECONDS = 1.0  # seconds between checks whether the parent has ended, while a signal is pending
FOREVER = 1e6  # seconds
PENDING_SECONDS = 1.0  # maximum seconds that a parent waits for a pending signal before it sends the same signal
_CONFIG_NAME = "samestep_signals"  # key in the configuration that multiprocessing sends to each child

# These variables are global because they describe this process and its threads.
_is_installed = False
_blocks = False  # whether this process is a child that blocks the stop signals
_thread = threading.local()  # attributes: mask and pid before a fork, and whether the thread executes a program


def install() -> None:
    """Let the children that this process starts from now on block the stop signals. Later calls have no effect."""
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
    """Unblock the stop signals in this process, which may be a child of a rank."""
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
    """Receive stop signals, and deliver each signal that takes effect.

    A signal takes effect if one of ``parents`` or this process sent the signal, if the parent has ended, or after
    `unblock`.

    Args:
        *parents: ids of the processes whose signals take effect; the first is the parent, the value of `os.getppid`.
    """
    waiting = 0  # a signal that has not been delivered, or 0
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
    """Send a signal to this process, and let the calling thread receive it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


class _StartedChild:
    """An object that protects a child which multiprocessing starts by spawn or forkserver.

    The child unpickles a copy of the object, and thereby calls `_protect_started`.
    """

    def __reduce__(self) -> tuple[Callable[[int], _StartedChild], tuple[int]]:
        return _protect_started, (os.getpid(),)


def _protect_started(creator: int) -> _StartedChild:
    """Protect this process, which inherited blocked signals. Its parent may be a fork server instead of ``creator``."""
    install()
    _protect(os.getppid(), creator)
    return _StartedChild()


def _waiting_for_pending(call: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function that signals a child, so that the call first waits while the same signal is pending.

    While a signal is pending, the system drops further signals with its number. The wait ends after PENDING_SECONDS.
    """

    def send_signal(popen: Any, number: int) -> None:
        deadline = time.monotonic() + PENDING_SECONDS
        while _is_pending(popen.pid, number) and time.monotonic() < deadline:
            time.sleep(0.001)
        call(popen, number)

    return send_signal


def _is_pending(pid: int, number: int) -> bool:
    """Return whether a signal to a process is pending: sent, but not received."""
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
    if getattr(_thread, "executes", False):  # `subprocess` calls fork hooks only with a preexec_fn
        signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)
    else:
        _protect(_thread.pid)


# --- around an exec --------------------------------------------------------------------------------------------------


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function ``name`` of ``owner`` by its wrapped version, if this version of Python has the function."""
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
    """Wrap a function that starts an interpreter, so that the interpreter starts with blocked stop signals."""

    def start(*arguments: Any) -> Any:
        with _mask(signal.SIG_BLOCK, STOP_SIGNALS):
            return call(*arguments)

    return start


def _keeping_mask(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it restores the signal mask, because the original unblocks SIGTERM and SIGINT."""

    def keep(*arguments: Any) -> Any:
        with _mask(signal.SIG_BLOCK, ()):
            return call(*arguments)

    return keep


def _executing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that executes a program, so that the program does not inherit blocked signals."""

    def execute(*arguments: Any, **keywords: Any) -> Any:
        _thread.executes = True
        try:
            with _mask(signal.SIG_UNBLOCK, STOP_SIGNALS if _blocks else ()):
                return call(*arguments, **keywords)
        finally:
            _thread.executes = False

    return execute


def _calling_shell(call: Callable[..., int]) -> Callable[..., int]:
    """Wrap `os.system`, so that a child keeps the stop signals blocked while it waits for the command."""

    def system(command: str | bytes) -> int:
        if not _blocks:
            return call(command)
        shell = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ)
        return os.waitpid(shell, 0)[1]

    return system
