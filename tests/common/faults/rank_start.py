"""Call a function at the start of each rank, whether the rank is a new Python process or a forked one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def is_rank() -> bool:
    """Return whether this process has a rank's environment variables. A launcher may import train.py, too."""
    return "RANK" in os.environ or '"rank":' in os.environ.get("SAMESTEP_JOB_INFO", "")


def in_each_rank(arm: Callable[[], None]) -> None:
    """Call ``arm`` in each rank, but not in its launcher. In a forked rank, the call precedes train.py."""
    if any(argument.endswith("train.py") for argument in sys.orig_argv[1:3]):
        arm()
    elif {"--start-method=fork", "samestep_launch.rank_forker"} & {*sys.orig_argv}:
        launcher = os.getpid()
        armed = list[int]()

        def on_audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "exec" or os.getpid() == launcher or armed or not is_rank():
                return
            if str(getattr(arguments[0], "co_filename", "")).endswith("train.py"):
                armed.append(os.getpid())
                arm()

        sys.addaudithook(on_audit)
