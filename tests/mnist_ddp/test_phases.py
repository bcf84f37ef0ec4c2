"""Whose time is it? What a rank waits for others is never its own, or the rank that holds them up could not be told."""

from __future__ import annotations

import json
import sys

from harness import ROOT, Harness, bare, python_path


def test_waiting_between_two_buckets_is_no_computing(harness: Harness) -> None:
    """Where small sums go by rank 0, backward() waits for the first bucket's before it goes on to the others."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "tests" / "mnist_ddp" / "two_buckets.py")]
    path = python_path(ROOT / "apps" / "mnist_ddp")
    outcome = bare(harness, command, GLOO_SOCKET_IFNAME="lo", PYTHONPATH=path)
    assert outcome.code == 0, outcome
    told = json.loads(outcome.stdout)
    assert told["waiting"] > 10 * told["computing"], told
    # What went along with a step's gradients: 0.4 of rank 0 and 1.4 of rank 1, a third of each; all is gone.
    assert (told["said"], told["left"], told["gradient"]) == ([0.4 + 1.4, 2 / 3], 0, [4.0]), told
