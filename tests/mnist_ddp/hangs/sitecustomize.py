"""Make one rank hang at a step: Python imports this at start when its folder is on PYTHONPATH.

SAMESTEP_HANG holds JSON: ``rank``, ``step`` and ``kind``, one of:

- ``never``: the rank hangs before its first import.

- ``skip``: the rank leaves out the all_gather by which ranks compare before the next checkpoint.

- ``order``: the rank calls broadcast and all_reduce at the next log line, the others all_reduce and broadcast.

- ``shapes``: the rank reduces more numbers at the next log line than the others.

- ``write``: the rank is stopped while it writes its first checkpoint, with one file open.

The rest of the program is unchanged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from rank_start import in_each_rank  # type: ignore[import-not-found]  # of tests/common/faults

_hang = json.loads(os.environ.get("SAMESTEP_HANG", "null"))


def _rank() -> int:
    return int(os.environ.get("RANK", "-1"))


def _at_step(act: Any) -> None:
    from samestep import sharding

    indices = sharding.GlobalBatches.indices

    def indices_and_more(self: Any, step: int, *micro_batch: Any) -> Any:
        if step == _hang["step"]:
            act()
        return indices(self, step, *micro_batch)

    sharding.GlobalBatches.indices = indices_and_more  # type: ignore[assignment,method-assign]


def _skip() -> None:
    sys.modules["samestep.torch.distributed"].__dict__["all_gather"] = lambda row: row[None]


def _at_log_lines(instead: Any) -> None:
    """Call ``instead(all_reduce, stats)`` where the app reduces a log line's statistics; an evaluation has 3 sums."""
    dist: Any = sys.modules["torch.distributed"]
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor: instead(all_reduce, tensor) if tensor.numel() > 3 else all_reduce(tensor)


def _order() -> None:
    import torch.distributed as dist

    def reordered(all_reduce: Any, stats: Any) -> None:
        calls: list[Any] = [all_reduce, lambda tensor: dist.broadcast(tensor, src=0)]
        for call in calls[::-1] if _rank() == _hang["rank"] else calls:
            call(stats)

    _at_log_lines(reordered)


def _shapes() -> None:
    import torch

    _at_log_lines(lambda all_reduce, stats: all_reduce(torch.cat([stats] * 100)))


def _stop_when_writing() -> None:
    from samestep.root import Root

    create = Root.create

    def stop_or_create(self: Root, name: str, mode: int = 0o666) -> Any:
        if name.endswith("/manifest.json"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return create(self, name, mode)

    Root.create = stop_or_create  # type: ignore[method-assign]


def _arm() -> None:
    kinds = {"skip": _skip, "order": _order, "shapes": _shapes}
    if _rank() != _hang["rank"] and _hang["kind"] != "order":
        return
    if _hang["kind"] == "never":
        time.sleep(600)
    elif _hang["kind"] == "write":
        _stop_when_writing()
    else:
        _at_step(kinds[_hang["kind"]])


if _hang:
    in_each_rank(_arm)
