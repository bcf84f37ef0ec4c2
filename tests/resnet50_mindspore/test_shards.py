"""Test shards.py, which counts the samples in shards of MindSpore and of `GlobalBatches` that do not divide evenly."""

from __future__ import annotations

import subprocess
import sys

from harness import ROOT

# Columns: steps, announced steps, global batch, last batch, samples used once, twice and never, batches equal to one
# rank's in order, and shuffled.
TABLE = {
    ("1", "MindSpore, drop_remainder=True"): "9 9 1,024 1,024 9,216 0 784 9 9",
    ("1", "MindSpore, drop_remainder=False"): "10 10 1,024 784 10,000 0 0 10 10",
    ("1", "GlobalBatches"): "10 10 1,024 784 10,000 0 0 - 10",
    # A shard has 3,334 samples, so 2 of 10,000 are repeated. A global batch of 1,024 would need shards of two sizes.
    ("3", "MindSpore, drop_remainder=True"): "9 9 1,026 1,026 9,234 0 766 0 0",
    ("3", "MindSpore, drop_remainder=False"): "10 10 1,026 768 9,998 2 0 0 0",
    ("3", "GlobalBatches"): "10 10 1,024 784 10,000 0 0 - 10",
}


def test_what_each_rank_is_given() -> None:
    program = str(ROOT / "apps" / "resnet50_mindspore" / "shards.py")
    done = subprocess.run(
        [sys.executable, program, "--files", "1", "--ranks", "3", "--global-batch-size", "1024"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heading, _, *lines = done.stdout.splitlines()
    assert heading == "10,000 samples, a global batch of 1,024"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert {(ranks, name): " ".join(counts) for ranks, name, *counts in cells} == TABLE
