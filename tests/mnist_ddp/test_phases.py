"""Test that the time in which a rank waits for other ranks does not count as computing."""

from __future__ import annotations

import json
import sys

from harness import ROOT, Harness, bare


def test_waiting_between_two_buckets_is_no_computing(harness: Harness) -> None:
    """For small models, backward() waits in the hook of the first bucket until rank 0 has reduced the bucket."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "tests" / "mnist_ddp" / "two_buckets.py")]
    outcome = bare(harness, command, GLOO_SOCKET_IFNAME="lo")
    assert outcome.code == 0, outcome
    output = json.loads(outcome.stdout)
    assert output["waiting"] > 10 * output["computing"], output
    assert output["gradient"] == [4.0], output
