"""Make one rank hang at a step. Python imports this module at startup from a folder of PYTHONPATH.

SAMESTEP_HANG holds a JSON object with ``rank``, ``step`` and ``kind``. The values of ``kind`` are:

- ``never``: the rank hangs before its first import.

- ``skip``: the rank skips the all_gather that compares the ranks before the next checkpoint.

- ``order``: at the next log line, the rank calls broadcast before all_gather, and the other ranks call broadcast after.

- ``shapes``: at the next log line, the rank gathers more numbers than the other ranks.

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


def _gather_by(kind: str, instead: Any) -> None:
    """Call ``instead(all_gather, row)`` for rows of a kind of dtype: "f" for log lines, others for comparisons."""
    functions = sys.modules["samestep.torch.distributed"].__dict__
    all_gather = functions["all_gather"]

    def gather(row: Any) -> Any:
        is_chosen = (row.dtype.kind == "f") == (kind == "f")
        if is_chosen:
            return instead(all_gather, row)
        return all_gather(row)

    functions["all_gather"] = gather


def _skip() -> None:
    _gather_by("i", lambda all_gather, row: row[None])


def _order() -> None:
    import torch
    import torch.distributed as dist

    def broadcast(row: Any) -> Any:
        dist.broadcast(torch.from_numpy(row), src=0)

    def reordered(all_gather: Any, row: Any) -> Any:
        if _rank() == _hang["rank"]:
            broadcast(row)
            return all_gather(row)
        gathered = all_gather(row)
        broadcast(row)
        return gathered

    _gather_by("f", reordered)


def _shapes() -> None:
    _gather_by("f", lambda all_gather, row: all_gather(row.repeat(100)))


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
