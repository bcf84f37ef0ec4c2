"""``--launcher spawn``: train.py starts the ranks itself, by paddle.distributed.spawn."""

from __future__ import annotations

import os
from collections.abc import Callable

import paddle.distributed as dist
from samestep import log
from samestep.options import Options


def spawn(main: Callable[[], None], options: Options) -> None:
    """Run ``main`` in each of --nprocs ranks, and end as they end: 0, 2 for the caller's mistake, 1 for all else."""
    settings = {"gpus": options.gpus} if options.gpus else {"backend": "gloo"} if options.device == "cpu" else {}
    job = dist.spawn(log.run, args=(main,), nprocs=options.nprocs or 1, join=False, **settings)
    try:
        while not job.join():
            pass
    except Exception:  # Paddle's word for a rank that failed; the rank itself has named the reason
        codes = {process.exitcode for process in job.processes}
        os._exit(2 if 2 in codes else 1)
