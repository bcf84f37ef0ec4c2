"""Time that a rank waits for others never counts as its own, or a straggler could not be found."""

from __future__ import annotations

import json
import sys

from harness import ROOT, Harness, bare


def test_waiting_between_two_buckets_is_no_computing(harness: Harness) -> None:
    """If rank 0 reduces small tensors, backward() waits for the first bucket's sum before the other buckets."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "tests" / "mnist_ddp" / "two_buckets.py")]
    outcome = bare(harness, command, GLOO_SOCKET_IFNAME="lo")
    assert outcome.code == 0, outcome
    output = json.loads(outcome.stdout)
    assert output["waiting"] > 10 * output["computing"], output
    assert output["gradient"] == [4.0], output
