"""Call a function at the start of each rank: of a process that runs train.py, or that is forked to run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def is_rank() -> bool:
    """Return whether this process has the variables of a rank: an app's own launcher may import train.py, too."""
    return "RANK" in os.environ or '"rank":' in os.environ.get("SAMESTEP_JOB_INFO", "")


def in_each_rank(arm: Callable[[], None]) -> None:
    """Call ``arm`` now in a rank, never in its launcher, and in a forked rank before it runs the program's block."""
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
