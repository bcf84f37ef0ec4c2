"""Test that ``samestep replay`` averages over the targets of each sample, without padding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, Harness, told_by
from samestep_observe.recorded import RecordedRun

STEP = 4
TARGETS = """
import json
from data import load
from model import load_tokenizer
from options import parse

options = parse({options!r})
print(json.dumps(load(options, load_tokenizer(options))[0].targets.tolist()))
"""


@pytest.mark.soak  # the quick tests replay a step (tests/common)
def test_a_replay_has_the_mean_loss_of_each_samples_targets(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The recorded loss is the mean of the samples' mean losses, weighted by their numbers of targets."""
    run_dir = undisturbed(2)["run_dir"]
    exported = harness.folder / "exported"
    words = ["replay", run_dir, f"--step={STEP}", f"--export={exported}"]
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *words],
        env=harness.environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done
    samples = json.loads((exported / f"step-{STEP:08d}" / "samples.json").read_text())
    targets = told_by("llm_finetune", TARGETS.format(options=[*harness.app.small]))
    total = sum(targets[each["sample"]] for each in samples)
    mean = sum(each["loss"] * targets[each["sample"]] for each in samples) / total
    assert mean == pytest.approx(RecordedRun(Path(run_dir)).losses[STEP], rel=1e-6)
