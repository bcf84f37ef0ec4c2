"""Hangs of one rank at a step: Python imports this at start when its folder is on PYTHONPATH.

SAMESTEP_HANG holds JSON: ``rank``, ``step`` and ``kind``:

- ``never``: the rank comes to nothing, not even to its first import;
- ``skip``: it leaves out the all_gather by which ranks compare before the next checkpoint;
- ``order``: it calls broadcast and all_reduce at the next log line, the others all_reduce and broadcast;
- ``shapes``: it adds one number more to the next log line's sums than the others;
- ``write``: it is stopped while it writes its first checkpoint, with one file open.

Nothing of the program is replaced but this.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

_hang = json.loads(os.environ.get("SAMESTEP_HANG", "null"))
_rank = int(os.environ.get("RANK", "-1"))
# The rank itself, not the launcher that has train.py among its arguments.
_is_rank = any(argument.endswith("train.py") for argument in sys.orig_argv[1:3])


def _at_step(act: Any) -> None:
    from samestep import sharding

    indices = sharding.GlobalBatches.indices

    def indices_and_more(self: Any, step: int, *micro_batch: Any) -> Any:
        if step == _hang["step"]:
            act()
        return indices(self, step, *micro_batch)

    sharding.GlobalBatches.indices = indices_and_more  # type: ignore[assignment,method-assign]


def _skip() -> None:
    sys.modules["ranks"].__dict__["all_gather"] = lambda row: row[None]


def _at_log_lines(instead: Any) -> None:
    """``instead(add_up, sums, gradients)`` where a log line's sums go along with the gradients."""
    ranks: Any = sys.modules["ranks"]
    add_up = ranks.add_up
    ranks.add_up = lambda *mine: instead(add_up, *mine) if len(mine) == 2 else add_up(*mine)


def _order() -> None:
    import torch.distributed as dist

    calls: list[Any] = [dist.all_reduce, lambda tensor: dist.broadcast(tensor, src=0)]

    def and_broadcast(add_up: Any, sums: Any, gradients: Any) -> None:
        for call in calls[::-1] if _rank == _hang["rank"] else calls:
            call(sums)
        add_up(gradients)

    _at_log_lines(and_broadcast)


def _shapes() -> None:
    import torch

    _at_log_lines(lambda add_up, sums, gradients: add_up(torch.cat([sums, sums[:1]]), gradients))


def _stop_when_writing(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith("/manifest.json"):
        os.kill(os.getpid(), signal.SIGSTOP)


if _hang and _is_rank and (_rank == _hang["rank"] or _hang["kind"] == "order"):
    kinds = {"skip": _skip, "order": _order, "shapes": _shapes}
    if _hang["kind"] == "never":
        time.sleep(600)
    elif _hang["kind"] == "write":
        sys.addaudithook(_stop_when_writing)
    else:
        _at_step(kinds[_hang["kind"]])
