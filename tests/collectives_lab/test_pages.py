"""Run the commands of collectives_lab that page comments select. test_commands_started.py runs the training apps."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest
from harness import Harness
from repository import clone

STARTED = {each.started: each for each in commands.found() if each.app == "collectives_lab" and each.started}


@pytest.mark.soak  # the quick tests check the options (test_commands.py)
@pytest.mark.parametrize("command", STARTED, ids=[each.place for each in STARTED.values()])
def test_each_start_of_the_pages_runs(harness: Harness, tmp_path: Path, command: str) -> None:
    repository = clone(tmp_path / "samestep")
    outcome = harness.start_command(["bash", "-c", command], harness.folder / "run", repository).finish()
    assert outcome.code == 0, outcome
    assert outcome.result["app"] == "collectives_lab"
    assert (repository / outcome.result["run_dir"]).is_dir()
