"""Define the row of the kit, in which a loop uses `samestep.torch` without an app."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from gpu_proof.jobs import Row, check_equal, largest_difference
from gpu_proof.ranks import printed, run_ranks

PROGRAM = Path(__file__).with_name("kit_loop.py")
STEPS = 14  # more than two epochs
KILLED_AT = 10  # after the second checkpoint, and before the third
TOLERANCE = 1e-12
CPU_TOLERANCE = 1e-9  # kernels differ, but dropout masks are equal


def kit(row: Row) -> dict[str, Any]:
    """Compare losses at 1, 2 and 3 ranks and on the CPU. Compare weights at 3 ranks with and without a kill."""
    calls = [partial(train, row, ranks) for ranks in (1, 2, 3)]
    found = row.together(calls)
    difference = largest_difference([each["losses"] for each in found], STEPS)
    if not difference <= TOLERANCE:
        raise RuntimeError(f"losses differ by {difference:.1e}: {[each['losses'] for each in found]}")
    figures = {"largest difference": difference, "tolerance": TOLERANCE, "backend": found[-1]["backend"]}
    if row.proof.device != "cpu":
        on_cpu = train(row, 1, device="cpu")
        figures["from the CPU's"] = largest_difference([found[0]["losses"], on_cpu["losses"]], STEPS)
        if not figures["from the CPU's"] <= CPU_TOLERANCE:
            raise RuntimeError(f"losses {found[0]['losses']}, on the CPU {on_cpu['losses']}")
    check_equal("weights", {"undisturbed": found[-1]["weights"], "killed": train_with_kill(row, 3)["weights"]})
    return figures


def train(row: Row, ranks: int, device: str = "") -> dict[str, Any]:
    """Train undisturbed, and return the JSON object that rank 0 prints.

    Args:
        row: row that starts the ranks.
        ranks: number of ranks.
        device: "cpu" or "cuda"; by default the proof's device.
    """
    device = device or row.proof.device
    words = [str(PROGRAM), device, str(row.proof.new_folder()), str(STEPS)]
    return printed(run_ranks(row, words, ranks, device=device))


def train_with_kill(row: Row, ranks: int) -> dict[str, Any]:
    """Train until the last rank kills itself, end the other ranks, resume, and return the object that rank 0 prints.

    Raises:
        RuntimeError: a rank fails, or the job starts at the first step instead of resuming.
    """
    words = [str(PROGRAM), row.proof.device, str(row.proof.new_folder()), str(STEPS)]
    run_ranks(row, [*words, str(KILLED_AT)], ranks, killed=ranks - 1)
    found = printed(run_ranks(row, words, ranks))
    if len(found["losses"]) >= STEPS:
        raise RuntimeError(f"the run started from the beginning: it took {len(found['losses'])} steps after the kill")
    return found
