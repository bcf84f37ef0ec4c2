"""Why does a run go back to its last good checkpoint? What is found out then; a rank in good order imports none of it.

A flipped bit has two faces. Ranks differ: they see it when they compare what they hold, before a checkpoint. Or a loss
is no number: by the gradients that is every rank's within a step, and then all may hold the same. A learning rate that
is too high has the second face too, but shows it again at the same step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import FatalError, RestartError, checkpoint
from samestep.env import World
from samestep.options import Options

_NOTE = "not-finite"  # in log/: the step at which a loss was no number, and in which start of the job
_AGAIN = "started again, the run goes on from the checkpoint before"


def unequal(sums: NDArray[Any], names: Sequence[str], step: int) -> RestartError:
    """For `Run.save`: who differs, in which array first; ``sums`` [world_size, arrays] is one row for each rank."""
    first = int((sums != sums[0]).any(axis=0).argmax())
    who, proof = odd_ones(sums[:, [first]])
    return RestartError(f"{who} at step {step}, first in {names[first]}: not saved{proof}; {_AGAIN}")


def unequal_at_the_end(digests: NDArray[Any]) -> RestartError:
    """For `Run.finish`: who differs, by ``digests`` [world_size, k] of all weights."""
    who, proof = odd_ones(digests)
    return RestartError(f"{who} in the weights of the end: no result{proof}; {_AGAIN}")


def retire_newest(run_dir: Path) -> None:
    """Rename the newest checkpoint, in which ranks turned out to differ, so that no start goes on from it."""
    checkpoint.finish()
    for folder in checkpoint.folders(run_dir)[:1]:
        checkpoint.retire(folder, "unequal")


def odd_ones(rows: NDArray[Any]) -> tuple[str, str]:
    """Which ranks differ, by ``rows`` [world_size, k]: those that are not of the majority; and words for where none is.

    Of two ranks either may be wrong.
    """
    _, kind, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    odd = np.flatnonzero(kind.reshape(-1) != counts.argmax()).tolist()
    if 2 * counts.max() <= len(rows):
        who = "ranks 0 and 1 differ" if len(rows) == 2 else f"the {len(rows)} ranks differ"
        return who, ", and without a majority it cannot be told who is right"
    return (f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {odd} differ") + " from all others", ""


def not_finite(what: str, value: float, step: int, options: Options, world: World) -> Exception:
    """For a loss that is no number: a RestartError, or a FatalError where it was so at this step in an earlier start.

    Each rank remembers it for its machine, as any of them may be ended before another has. What the ranks of one start
    write is equal, and does not count for it.
    """
    note, start = options.run_dir / "log" / _NOTE, int(os.environ.get("SAMESTEP_RESTARTS", "0"))
    start += world.restart_count or 0
    text = f"at step {step} the {what} is {value}: lower --lr, now {options.lr}"
    with contextlib.suppress(OSError, ValueError):
        its_step, its_start = map(int, note.read_text().split())
        if its_step == step and its_start < start:
            return FatalError(f"{text}; it was so in an earlier start too")
    with contextlib.suppress(OSError):  # without it there is one start more
        temporary = note.with_name(f".{note.name}.{world.rank}.tmp")
        temporary.write_text(f"{step} {start}")
        temporary.replace(note)
    return RestartError(f"{text}, unless a flipped bit made it so; {_AGAIN}")
