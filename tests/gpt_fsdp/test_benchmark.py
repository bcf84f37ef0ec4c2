"""Run the benchmarks of a step and of a checkpoint."""

from __future__ import annotations

import sys

import pytest
from harness import ROOT, Harness, bare

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.soak
def test_the_benchmark_of_a_step_still_runs(harness: Harness) -> None:
    """Run one round of a small model; the numbers have no meaning."""
    program = str(ROOT / "benchmarks" / "fsdp_step.py")
    options = ["--rounds=1", "--", "--layers=1", "--width=32", "--heads=4", "--context=32"]
    outcome = bare(harness, [*LAUNCHER, program, *options])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count(" ms ") == 3


@pytest.mark.soak
def test_the_benchmark_of_a_checkpoint_still_runs(harness: Harness) -> None:
    program = str(ROOT / "benchmarks" / "fsdp_checkpoint.py")
    outcome = bare(harness, [*LAUNCHER, program, "--quick", f"--dir={harness.folder}"])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("| --layers=") == 1
    assert not list(harness.folder.glob("benchmark-*"))
