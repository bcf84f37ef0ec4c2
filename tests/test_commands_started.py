"""Run the commands that a page's comment selects, in the environment of their app, with the comment's options."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import commands
import pytest
from amounts import amount
from harness import Harness
from repository import clone

IN_MATRIX = {"README.md", "docs/own_loop.md"}  # the other pages start the apps as other tests do
SOAK = [pytest.mark.soak]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each command once, even if several pages have it. test_commands.py checks the options of all commands."""
    app = metafunc.config.getoption("--app")
    pages: dict[str, list[commands.Command]] = {}
    for command in commands.found():
        if command.app == app and command.started:
            pages.setdefault(command.started, []).append(command)
    cases = [
        pytest.param(started, id=found[0].place, marks=[] if IN_MATRIX & {each.page for each in found} else SOAK)
        for started, found in pages.items()
    ]
    metafunc.parametrize("command", cases)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("commands") / "samestep")


def test_a_start_that_a_page_shows_works(harness: Harness, repository: Path, soak: bool, command: str) -> None:
    """Run the command with this Python's programs first in PATH; outside a soak, 2 ranks replace 4 ranks."""
    command = amount(soak, few=re.sub(r"(/run_\w+\.sh) 4\b", r"\1 2", command), many=command)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = harness.start_command(["bash", "-c", command], harness.folder / "run", repository, PATH=path)
    outcome = job.finish()
    assert outcome.code == 0, outcome
    if "own_loop.py" in command:
        assert outcome.stdout.splitlines()[-1].endswith("of 1000)")  # each test example once
        return
    assert outcome.result["app"] == harness.app.name
    assert outcome.result["steps"] == 2
    run_dir = repository / outcome.result["run_dir"]
    assert (run_dir / "result.json").exists()
