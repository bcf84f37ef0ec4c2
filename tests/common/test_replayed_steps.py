"""``samestep replay`` of an app's run: the launch script, the probes of its framework, and the recorded bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, Harness
from samestep_observe.recorded import RecordedRun

STEP = 3  # before which small runs have no checkpoint, or one


@pytest.mark.replayed
def test_a_replayed_step_has_the_recorded_bits(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """The probes see the loss of each sample, the gradients, the updates and the activations."""
    run_dir = undisturbed(2)["run_dir"]
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "replay", run_dir, f"--step={STEP}"],
        env=harness.environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done
    assert f"loss {RecordedRun(Path(run_dir)).losses[STEP]!r}: the recorded bits" in done.stdout
    assert "not seen" not in done.stdout, done.stdout
    for text in ("learning rate ", "largest losses: sample ", "weight  shape", "largest activations: "):
        assert text in done.stdout, done.stdout
