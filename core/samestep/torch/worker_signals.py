"""Start a DataLoader's workers so that they survive a stop signal to their process group, and end with their rank.

If a signal ended a worker, torch's handler of SIGCHLD would raise RuntimeError in the rank before the rank can save.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from samestep.stop import REPEAT_SECONDS, STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # option of prctl(2)
_iterations: weakref.WeakSet[Any] = weakref.WeakSet()  # the DataLoader iterations that have workers


@contextlib.contextmanager
def blocked_stop_signals(start_method: str) -> Iterator[None]:
    """Block stop signals in this thread during the context. Workers that start in the context inherit the block.

    `WorkerInit` unblocks the signals in a worker.

    Args:
        start_method: multiprocessing's start method of the workers, such as "fork".
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if start_method != "fork":
            resource_tracker.ensure_running()  # the first start of the tracker unblocks TERM and INT
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerInit:
    """A ``worker_init_fn`` that sets the signal handlers of a worker, and then calls the user's ``worker_init_fn``.

    The worker ignores stop signals for a second after the first one, because launchers repeat them. A later signal ends
    the worker, because multiprocessing sends TERM to a worker that hangs.
    """

    def __init__(self, start_method: str, user_function: Callable[[int], None] | None) -> None:
        self._parent = None if start_method == "forkserver" else os.getpid()
        self._user_function = user_function
        self._first_signal_time = 0.0

    def __call__(self, worker: int) -> None:
        """Set the signal handlers in the worker with the number ``worker``."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._parent not in (None, os.getppid()):  # the rank ended before prctl was called
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._user_function:
            self._user_function(worker)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first_signal_time = self._first_signal_time or now
        if now - self._first_signal_time > REPEAT_SECONDS:
            os._exit(128 + number)


def remember_workers(iteration: Any) -> None:
    """Register a DataLoader iteration with workers for `stop_workers`, which is also called at Python's exit.

    multiprocessing's exit function sends TERM to the workers, and then waits for them without a time limit. But a
    worker ignores the first signal.
    """
    if not _iterations:
        atexit.unregister(stop_workers)
        atexit.register(stop_workers)  # runs before multiprocessing's exit function, which was registered earlier
    _iterations.add(iteration)


def stop_workers() -> None:
    """End all workers. Without this call, an exit in the middle of an epoch would wait 5 s for each worker."""
    for iteration in list(_iterations):
        iteration._shutdown_workers()
