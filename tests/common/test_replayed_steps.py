"""Test that ``samestep replay`` repeats steps of an app's run with the recorded bits."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, Harness, faulty
from samestep_observe.recorded import RecordedRun

STEP = 3  # small runs have at most one checkpoint before this step
KILLED = 8  # a rank dies at the beginning of this step


def replay(harness: Harness, run_dir: str, step: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "samestep", "replay", run_dir, f"--step={step}"],
        env=harness.environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.replayed
def test_a_replayed_step_has_the_recorded_bits(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """The probes record the loss of each sample, the gradients, the updates and the activations."""
    run_dir = undisturbed(2)["run_dir"]
    done = replay(harness, run_dir, STEP)
    assert done.returncode == 0, done
    assert f"loss {RecordedRun(Path(run_dir)).losses[STEP]!r}: the recorded bits" in done.stdout
    assert "not seen" not in done.stdout, done.stdout
    for text in ("learning rate ", "largest losses: sample ", "weight  shape", "largest activations: "):
        assert text in done.stdout, done.stdout


@pytest.mark.replayed
@pytest.mark.soak  # the quick tests replay a step of a run on two ranks (the test above)
@pytest.mark.parametrize("virtual_ranks", [False, pytest.param(True, marks=pytest.mark.virtual_ranks)])
def test_random_steps_of_a_killed_run_have_the_recorded_bits(
    harness: Harness, virtual_ranks: bool, table: list[str]
) -> None:
    """The run has three ranks. With virtual ranks, one process replays the steps."""
    tree = ["--virtual-ranks=4"] if virtual_ranks else []
    fault = faulty({"rank": 1, "signal": signal.SIGKILL, "step": KILLED})
    job = harness.start(3, *harness.app.small, "--keep-checkpoints=99", *tree, **fault)
    result = harness.checked(job.finish(), 3)
    assert result["restarts"] == 1
    steps = random.sample(range(1, result["steps"] + 1), harness.app.replayed_steps)
    for step in steps:
        done = replay(harness, result["run_dir"], step)
        assert done.returncode == 0, done
        assert f"at {'1 rank' if virtual_ranks else '3 ranks'}, from " in done.stderr, done
    table.append(f"| {harness.app.name} | 3 | SIGKILL, {len(steps)} steps replayed | {len(steps)} | {len(steps)} |")
