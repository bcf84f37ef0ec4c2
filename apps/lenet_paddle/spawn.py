"""Start the ranks by paddle.distributed.spawn (``--launcher spawn``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import distributed
import paddle.distributed as dist
from samestep import ConfigError, log, stop
from samestep.options import Options


def spawn(main: Callable[[], None], options: Options) -> None:
    """Start the ranks, run ``main`` in each rank, and return if all ranks succeed.

    If a rank fails, exit with 2 for a ConfigError, with 128 + the number of a stop signal, or with 1.
    """
    count, settings = choose(options)
    job = dist.spawn(log.run, args=(main,), nprocs=count, join=False, **settings)

    def forward_signal(number: int, frame: object) -> None:
        for process in job.processes:  # each rank then saves a checkpoint and stops
            with suppress(ProcessLookupError):  # the rank has ended; others may still train or save
                os.kill(process.pid, number)

    for number in stop.STOP_SIGNALS:
        signal.signal(number, forward_signal)
    try:
        while not job.join():
            pass
    except Exception:  # a rank failed, and has logged the reason
        codes = {process.exitcode or 0 for process in job.processes}
        if 2 in codes:
            os._exit(2)
        signals = [code for code in codes if code > 128]
        os._exit(max(signals, default=1))


def choose(options: Options) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks, and keyword arguments of paddle.distributed.spawn.

    Without --nprocs, the number of ranks is the number of GPUs in --gpus. Without --gpus, it is the number of this
    machine's GPUs or, if there are none, of processors that this process may use.

    Raises:
        ConfigError: --gpus lists more GPUs than the machine has.
    """
    available = 0
    if options.device != "cpu":
        available = distributed.gpu_count()
    named = 0
    if options.gpus:
        named = len(options.gpus.split(","))
    count = options.nprocs or named or available or len(os.sched_getaffinity(0))
    if available < count and options.gpus:
        raise ConfigError(
            f"--gpus {options.gpus}: this machine has {available} GPUs for {count} ranks: start fewer, or leave the "
            "option out"
        )
    if available < count:  # Paddle's default backend would fail; the ranks use the CPU, or report the missing GPUs
        return count, {"backend": "gloo"}
    settings = {"backend": "nccl"}
    if options.gpus:
        settings["gpus"] = options.gpus
    return count, settings
