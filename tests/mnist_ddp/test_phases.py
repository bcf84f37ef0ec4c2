"""Whose time is it? What a rank waits for others is never its own, or the rank that holds them up could not be told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness import ROOT


def test_waiting_between_two_buckets_is_no_computing() -> None:
    """Where small sums go by rank 0, backward() waits for the first bucket's before it goes on to the others."""
    path = os.pathsep.join(map(str, [ROOT / "core", ROOT / "apps" / "mnist_ddp"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "tests" / "mnist_ddp" / "two_buckets.py")]
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)
    assert seconds["waiting"] > 10 * seconds["computing"], seconds
