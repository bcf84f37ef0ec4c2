"""Start the ranks by paddle.distributed.spawn (``--launcher spawn``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import distributed
import paddle.distributed as dist
from samestep import ConfigError, log, stop
from samestep.options import Options


def spawn(main: Callable[[], None], options: Options) -> None:
    """Run ``main`` in each of --nprocs ranks, and return if all succeed.

    Otherwise exit with 2 for a mistake of the caller, 128 + a signal that stopped the ranks, or 1 for anything else.
    """
    count, settings = choose(options)
    job = dist.spawn(log.run, args=(main,), nprocs=count, join=False, **settings)

    def forward_signal(number: int, frame: object) -> None:
        for process in job.processes:  # the ranks then save a step
            os.kill(process.pid, number)

    for number in stop.STOP_SIGNALS:
        signal.signal(number, forward_signal)
    try:
        while not job.join():
            pass
    except Exception:  # Paddle raises it for a rank that failed; the rank itself has reported the reason
        codes = {process.exitcode or 0 for process in job.processes}
        if 2 in codes:
            os._exit(2)
        signals = [code for code in codes if code > 128]
        os._exit(max(signals, default=1))


def choose(options: Options) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks, and Paddle's settings for them.

    Without --nprocs they take all devices, as paddle.distributed.spawn itself would: the GPUs, or the processors, but
    only those that this process may use.

    Raises:
        ConfigError: --gpus names more GPUs than there are. Each rank would report it.
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
    if available < count:  # Paddle would fail; the ranks take the CPU, or refuse --device gpu
        return count, {"backend": "gloo"}
    settings = {"backend": "nccl"}
    if options.gpus:
        settings["gpus"] = options.gpus
    return count, settings
