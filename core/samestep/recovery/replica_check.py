"""Describe why a run returns to its last valid checkpoint: ranks differ, or a loss is NaN or infinite.

A flipped bit can have one of these two effects. The ranks detect a difference when they compare their arrays before a
checkpoint. If a loss is NaN, the gradients become NaN on every rank within a step, so the ranks may be equal. A
learning rate that is too high also causes NaN, at the same step in every start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import NonRetryableError, RetryableError, checkpoint
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.options import Options
from samestep.untrusted import integer, read_object, write_json

_NOTE = "not-finite"  # file in log/ with the step of a NaN or infinite loss, and the number of earlier starts
_RESTART = "a restart resumes from an earlier checkpoint"
_REPEATED = "which not all ranks compute alike: broadcast buffers, and seed random numbers independently of the rank"


def quarantine_newest(run_dir: Path) -> None:
    """Rename the newest checkpoint, in which ranks differ, so that no run resumes from it."""
    checkpoint.finish()
    for folder in checkpoint.folders(run_dir)[:1]:
        checkpoint.quarantine(folder, "unequal")


def unequal(checksums: NDArray[Any], step: int, names: Sequence[str] = ()) -> RetryableError:
    """Return the error for ranks that differ.

    Args:
        checksums: [world_size, k], one row per rank; not all rows are equal.
        step: number of updates done.
        names: name of each column's array; empty if the columns are a digest of the final weights.
    """
    if not names:
        ranks, unknown = minority_ranks(checksums)
        repeated = f"{ranks} in the final weights, {_REPEATED}"
        return RetryableError(f"{ranks} in the final weights: no result{unknown}; {_RESTART}", repeated=repeated)
    is_unequal = (checksums != checksums[0]).any(axis=0)
    first = int(is_unequal.argmax())
    ranks, unknown = minority_ranks(checksums[:, [first]])
    repeated = f"{ranks} at step {step}, first in {names[first]}, {_REPEATED}"
    return RetryableError(
        f"{ranks} at step {step}, first in {names[first]}: not saved{unknown}; {_RESTART}", repeated=repeated
    )


def minority_ranks(rows: NDArray[Any]) -> tuple[str, str]:
    """Describe the ranks whose rows differ from the majority.

    Args:
        rows: [world_size, k], one row per rank.

    Returns:
        (description, addition to the message if no majority exists, else "").
    """
    _, kind, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    if 2 * counts.max() <= len(rows):
        ranks = "ranks 0 and 1" if len(rows) == 2 else f"the {len(rows)} ranks"
        return f"{ranks} differ", ", and without a majority the wrong rank is unknown"
    minority = np.flatnonzero(kind.reshape(-1) != counts.argmax()).tolist()
    if len(minority) == 1:
        return f"rank {minority[0]} differs from all others", ""
    return f"ranks {minority} differ from all others", ""


def not_finite(name: str, value: float, step: int, options: Options, world: World) -> Exception:
    """Return the error for a loss that is NaN or infinite.

    Each rank writes the step to a file for the next start, because some ranks may end before they write the file. All
    ranks of a start write the same content.

    Args:
        name: name of the loss, for the error.
        value: the loss.
        step: number of updates done.
        options: the run's parsed command-line options.
        world: rank, world size and launcher of this process.

    Returns:
        RetryableError; NonRetryableError if an earlier start had such a loss at the same step.
    """
    start = JobInfo.from_environ(os.environ).restarts + (world.restart_count or 0)
    text = f"at step {step} the {name} is {value}: lower --lr, now {options.lr}"
    logs = options.run_dir / "log"
    note = read_object(logs / _NOTE)
    if note.get("step") == step and integer(0, start - 1)(note.get("start")):
        return NonRetryableError(f"{text}; the same happened in an earlier start")
    write_json(logs, _NOTE, {"step": step, "start": start}, world.rank)
    return RetryableError(f"{text}, unless a flipped bit caused it; {_RESTART}", repeated=text)
