"""Stop all ranks after the same step if one of them receives TERM, USR1 or INT."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from samestep.stop import Stopped, StopRequest, decode
from samestep.torch.ranks import collective_device, place

GRACE_PART = 0.25  # fraction of the grace time between two all-reduces
MAX_STEPS = 64  # maximum number of steps between two all-reduces, because steps may become slower

_installed: StopRequests | None = None  # this variable is global because signal handlers belong to the process
_exit_code: int | None = None  # exit code of a stopped program; None before a stop


class StopRequests:
    """Receive stop signals, and agree with all ranks on the step after which all stop.

    A rank exits at once, without saving, at a signal before its first step, at a second signal, and ``grace`` seconds
    after a signal.

    Args:
        grace: maximum seconds from a signal to the exit.

    Raises:
        ValueError: ``grace`` is not above 0.
        RuntimeError: this process already has an instance.
    """

    def __init__(self, grace: float = 20.0) -> None:
        global _installed
        if not grace > 0:
            raise ValueError(f"grace must be above 0, got {grace}")
        if _installed is not None and _installed.signal:  # a stop that has not ended this process, such as a notebook
            _installed.release()
        if _installed is not None:
            raise RuntimeError("this process has StopRequests already: pass grace=None to the second Checkpoints")
        if threading.current_thread() is not threading.main_thread():
            print("warning: stop signals save no checkpoint, as this is not the main thread", file=sys.stderr)
        _installed = self
        self.signal: int = 0  # the signal that the ranks agreed on, or 0
        self.grace = grace
        self._request = StopRequest(grace, _exit_now)
        self._request.install()
        self._steps_left = 1  # steps until the next all-reduce
        self._interval = 1
        self._last_time = time.monotonic()

    def release(self) -> None:
        """Install the former signal handlers again, such as Python's own. Another instance may follow.

        If the ranks have agreed on no signal, this process sends a signal that it has received to itself again.
        """
        global _installed
        _installed = None
        self._request.release(is_answered=self.signal != 0)

    def step(self) -> int:
        """Count a step, and call `agree` after some steps. Call this method after each step on all ranks.

        The interval between two calls of `agree` is about a quarter of the grace time, at least 1 and at most 64 steps.

        Returns:
            The signal that the ranks agreed on, or 0. The value is the same on all ranks.
        """
        self._steps_left -= 1
        return self.signal if self._steps_left else self.agree()

    def agree(self) -> int:
        """Reduce the stop requests of all ranks, and return the signal or 0. This call is a collective."""
        self._request.in_training = True
        now = time.monotonic()
        seconds = (now - self._last_time) / self._interval
        self._last_time = now
        row = torch.tensor([*self._request.encode(), seconds], dtype=torch.float64, device=collective_device())
        if place().world_size > 1:
            dist.all_reduce(row, op=dist.ReduceOp.MAX)  # collective
        *votes, slowest = row.tolist()
        self.signal, _ = decode(votes)
        self._interval = max(1, min(MAX_STEPS, int(self.grace * GRACE_PART / max(slowest, 1e-6))))
        self._steps_left = self._interval
        return self.signal


def exit_stopped(code: int) -> NoReturn:
    """Raise SystemExit with an exit code, and skip Python's shutdown afterwards."""
    global _exit_code
    _exit_code = code
    raise SystemExit(code)


def _skip_shutdown() -> None:
    """Skip Python's shutdown after a stop, because gloo's threads may abort it with another exit code."""
    if _exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


atexit.register(_skip_shutdown)  # exit functions that are registered later run before this one


def _exit_now(stopped: Stopped) -> NoReturn:
    print(stopped, file=sys.stderr, flush=True)
    os._exit(stopped.exit_code)
