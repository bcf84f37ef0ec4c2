"""Test the checkpoints of the two values of --gradients."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, Harness, bare, losses, relative_difference

APP = ROOT / "apps" / "mnist_horovod"
TRAIN = str(APP / "train.py")
STORED = Path(__file__).parent / "stored" / "version-0.2"


# --- checkpoints ---------------------------------------------------------------------------------------------------


def train_alone(harness: Harness, gradients: str, run_dir: Path, *options: str) -> dict[str, Any]:
    """Train in one process without a launcher, and return the result."""
    command = [sys.executable, TRAIN, "--dataset=mnist-5k", "--log-every=1", f"--gradients={gradients}", *options]
    return harness.checked(bare(harness, [*command, f"--run-dir={run_dir}"]), 1)


def test_a_resume_with_a_distributed_optimizer_ends_with_the_same_weights(harness: Harness) -> None:
    """Equal checkpoints of both options let a run change the option at a resume."""
    whole = harness.folder / "whole"
    parts = harness.folder / "parts"
    expected = train_alone(harness, "group", whole, "--max-steps=6", "--checkpoint-every=3")
    train_alone(harness, "optimizer", parts, "--max-steps=3")
    found = train_alone(harness, "optimizer", parts, "--max-steps=6")
    assert found["resumed_from_step"] == 3
    assert found["weights_sha256"] == expected["weights_sha256"]
    for step in ("step-00000003", "step-00000006"):
        for name in ("model.safetensors", "optimizer.safetensors"):
            file = Path("checkpoints", step, name)
            assert (parts / file).read_bytes() == (whole / file).read_bytes(), file


def test_a_distributed_optimizer_resumes_a_run_of_version_02(harness: Harness) -> None:
    """The stored run used --gradients group and momentum, without dropout."""
    run_dir = harness.folder / "run"
    shutil.copytree(STORED / "run", run_dir)
    options = (STORED / "options").read_text().split()
    result = train_alone(harness, "optimizer", run_dir, *options, "--max-steps=6")
    assert result["resumed_from_step"] == 2
    assert relative_difference(losses(STORED / "longer"), losses(run_dir)) < 1e-6
