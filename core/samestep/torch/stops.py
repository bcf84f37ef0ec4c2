"""Let all ranks stop after the same step when one of them receives TERM, USR1 or INT."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from samestep.stop import Stopped, StopRequest, decode
from samestep.torch.ranks import collective_device, place

GRACE_PART = 0.25  # of the grace time, within which the ranks must agree
MAX_STEPS = 64  # between two all-reduces: more would save nothing, and steps may become slower meanwhile

_is_installed = False  # signal handlers are process state
_exit_code: int | None = None  # of a stopped program


class StopRequests:
    """Hold the stop signal that this process received, and the one that the ranks agreed on.

    A rank exits at once, unsaved, after a signal before its first step, after a second signal, and ``grace`` seconds
    after a signal.

    Args:
        grace: seconds from a signal to the end.

    Raises:
        RuntimeError: this process has an instance already.
    """

    def __init__(self, grace: float = 20.0) -> None:
        global _is_installed
        if not grace > 0:
            raise ValueError(f"grace must be above 0, got {grace}")
        if _is_installed:
            raise RuntimeError("this process has StopRequests already: pass grace=None to the second Checkpoints")
        _is_installed = True
        self.signal = 0  # that the ranks agreed on; 0 for none
        self._grace = grace
        self._request = StopRequest(grace, _exit_now)
        self._request.install()
        self._steps_left = 1  # until the next all-reduce
        self._interval = 1
        self._last_time = time.monotonic()

    def step(self) -> int:
        """Count a step, and `agree` after some steps. Call it after each step on all ranks.

        The ranks choose the number of steps so that it takes a quarter of the grace time, and at most 64 steps.

        Returns:
            The signal that the ranks agreed on, or 0. It is the same on all ranks.
        """
        self._steps_left -= 1
        return self.signal if self._steps_left else self.agree()

    def agree(self) -> int:
        """Reduce the stop requests of all ranks; return the signal, or 0. Collective."""
        self._request.in_training = True
        now = time.monotonic()
        seconds = (now - self._last_time) / self._interval
        self._last_time = now
        row = torch.tensor([*self._request.encode(), seconds], dtype=torch.float64, device=collective_device())
        if place().world_size > 1:
            dist.all_reduce(row, op=dist.ReduceOp.MAX)  # collective
        *votes, slowest = row.tolist()
        self.signal, _ = decode(votes)
        self._interval = max(1, min(MAX_STEPS, int(self._grace * GRACE_PART / max(slowest, 1e-6))))
        self._steps_left = self._interval
        return self.signal


def exit_stopped(code: int) -> NoReturn:
    """End the program by SystemExit, with this exit code."""
    global _exit_code
    _exit_code = code
    raise SystemExit(code)


def _skip_shutdown() -> None:
    """After a stop, skip Python's shutdown, which threads of gloo may abort with another exit code."""
    if _exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


atexit.register(_skip_shutdown)  # exit functions that are registered later run before it


def _exit_now(stopped: Stopped) -> NoReturn:
    print(stopped, file=sys.stderr, flush=True)
    os._exit(stopped.exit_code)
