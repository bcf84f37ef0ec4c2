"""Test that the README's first commands, exactly as printed, end with equal weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import commands
import pytest
from harness import Harness
from repository import clone


@pytest.mark.slow
def test_the_two_commands_of_the_readme_end_with_the_same_weights(harness: Harness, tmp_path: Path) -> None:
    repository = clone(tmp_path / "samestep")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    page = (commands.ROOT / "README.md").read_text()
    starts = [each.text for each in commands.commands("README.md", page) if "run_mnist_ddp.sh" in each.text]
    results = []
    for number, command in enumerate(starts[:2]):
        job = harness.start_command(["bash", "-c", command], harness.folder / str(number), repository, PATH=path)
        outcome = job.finish()
        assert outcome.code == 0, outcome
        results.append(outcome.result)
    assert [result["world_size"] for result in results] == [1, 4]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"]
    assert results[0]["steps"] == 160
