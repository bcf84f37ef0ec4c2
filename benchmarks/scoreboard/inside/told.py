"""Log the training of a scoreboard example; the lines that the harness added to it call this module.

Each process appends lines of JSON to a file of its own in the folder SCOREBOARD_TOLD, one for each step, each batch of
an evaluation, each checkpoint saved or restored. Without that folder the module neither logs nor waits.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("SCOREBOARD_TOLD")
_PAUSE = float(os.environ.get("SCOREBOARD_PAUSE", "0"))  # seconds: so small a model is trained before it can be killed
_RANKS = ("REPLICA_GROUP_ID", "RANK", "HOROVOD_RANK", "LOCAL_RANK")  # the first that is set
_known: dict[bytes, int] = {}


def rank() -> int:
    return int(next((os.environ[name] for name in _RANKS if name in os.environ), "0"))


def number(name: str, default: int) -> int:
    """A whole number that the harness asks for, such as how many epochs an example without an option for it trains."""
    return int(os.environ.get(f"SCOREBOARD_{name}", default))


def dataset(found: Any) -> Any:
    """Know the images of a data set, which must give the same tensor for an index each time; returns it as it is."""
    if _FOLDER:
        _known.update((found[i][0].numpy().tobytes(), i) for i in range(len(found)))
    return found


def _indices(images: Any) -> list[int]:
    return [_known[each.numpy().tobytes()] for each in images.cpu()]


def _tell(event: str, **values: Any) -> None:
    if not _FOLDER:
        return
    values = {"event": event, "time": time.time(), "rank": rank(), "pid": os.getpid(), **values}
    with Path(_FOLDER, f"{rank()}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def step(epoch: int, batch: int, loss: Any, images: Any = None, indices: Any = None) -> None:
    """A step was taken on this rank's ``images``, or on those that the indices are of; ``loss`` is theirs."""
    found = _indices(images) if images is not None else [int(index) for index in indices]
    _tell("step", epoch=epoch, batch=batch, loss=float(loss.detach()), indices=found)
    if _FOLDER:
        time.sleep(_PAUSE)


def evaluated(count: int, epoch: int = 0) -> None:
    """So many more examples count in an evaluation."""
    _tell("evaluated", count=int(count), epoch=epoch)


def saved(epoch: int, batch: int = -1) -> None:
    """Log a checkpoint of the training up to this step. Batch -1 means before the first batch of the epoch."""
    _tell("saved", epoch=epoch, batch=batch)


def restored() -> None:
    _tell("restored")
