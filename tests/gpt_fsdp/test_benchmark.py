"""The benchmark of a step: it still runs."""

from __future__ import annotations

import sys

from harness import ROOT, Harness, bare


def test_the_benchmark_still_runs(harness: Harness) -> None:
    """One round of a small model, whose numbers are of no meaning."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = str(ROOT / "benchmarks" / "fsdp_step.py")
    options = ["--rounds=1", "--", "--layers=1", "--width=32", "--heads=4", "--context=32"]
    outcome = bare(harness, [*launcher, program, *options])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count(" ms ") == 3
