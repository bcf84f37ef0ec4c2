"""``--launcher spawn``: train.py starts the ranks itself, by paddle.distributed.spawn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import paddle.distributed as dist
import ranks
from samestep import log, signals
from samestep.options import Options


def spawn(main: Callable[[], None], options: Options) -> None:
    """Run ``main`` in each of --nprocs ranks, and end as they end: 0, 2 for the caller's mistake, 128 + a signal that
    stopped them, 1 for all else."""
    count, settings = choose(options)
    job = dist.spawn(log.run, args=(main,), nprocs=count, join=False, **settings)

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in job.processes:  # which save a step
            os.kill(process.pid, number)

    for number in signals.WISHES:
        signal.signal(number, hand_on)
    try:
        while not job.join():
            pass
    except Exception:  # Paddle's word for a rank that failed; the rank itself has named the reason
        codes = {process.exitcode for process in job.processes}
        stopped = {code for code in codes if code and code > 128}
        os._exit(2 if 2 in codes else max(stopped, default=1))


def choose(options: Options) -> tuple[int, dict[str, Any]]:
    """How many ranks, and Paddle's settings for them.

    Without --nprocs they take all devices, as paddle.distributed.spawn itself would: the GPUs, or the processors, but
    of these no more than this process may use.
    """
    found = 0 if options.device == "cpu" else ranks.gpu_count()
    named = len(options.gpus.split(",")) if options.gpus else 0
    count = options.nprocs or named or found or len(os.sched_getaffinity(0))
    if found < count:  # Paddle itself would fail; --device auto means the CPU, and to --device gpu the ranks say no
        return count, {"backend": "gloo"}
    return count, {"backend": "nccl", "gpus": options.gpus} if options.gpus else {"backend": "nccl"}
