"""Resume a run that an earlier version wrote. A copy of the app has no such run, so it has no copy of this file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import Harness, losses, metrics, relative_difference

STORED = Path(__file__).parent / "stored"
STORED_OPTIONS = ["--dataset=mnist-5k", "--seed=3", "--log-every=1", "--global-batch-size=500", "--checkpoint-every=2"]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_run_of_version_0_1_resumes_with_the_same_losses(harness: Harness, n: int) -> None:
    """``stored/version-0.1`` has what version 0.1 wrote with STORED_OPTIONS on 1 rank.

    ``run`` is a run dir of --max-steps=2, without logs and final weights; ``longer`` is metrics.jsonl of --max-steps=6.
    """
    run_dir = harness.folder / "run"
    shutil.copytree(STORED / "version-0.1" / "run", run_dir)
    result = harness.train(n, *STORED_OPTIONS, "--max-steps=6")
    assert (result["resumed_from_step"], result["steps"]) == (2, 6)
    expected = STORED / "version-0.1" / "longer"
    assert len(losses(expected)) == 6
    assert relative_difference(losses(expected), losses(run_dir)) < 1e-6
    accuracies, expected_accuracies = ([line["accuracy"] for line in metrics(folder)] for folder in (run_dir, expected))
    assert accuracies == expected_accuracies
