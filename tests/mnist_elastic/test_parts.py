"""Test parts of the launcher and of a member without a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("parts.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON that parts.py prints."""
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, cwd=tmp_path_factory.mktemp("parts"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def test_members_are_ordered_ranks_numbered_and_pauses_measured(found: dict[str, Any]) -> None:
    # Rank 0 is the oldest member with the highest progress and the most frequent state. Members behind come last.
    assert found["order"] == ["000003", "000005", "000001", "000000"]
    # A number is free if no rank has it or its rank has left. An exit code is known once the connection has ended.
    assert found["free"] == [3, 1]
    assert found["exit codes"] == [None, 7]
    # A pause lasts from the last update before it to the next update.
    assert found["result"]["members"] == [{"step": 0, "ranks": [1, 2]}, {"step": 1, "ranks": [1]}]
    assert len(found["result"]["pauses"]) == 1


def test_losses_bin_has_a_repeated_step_once(found: dict[str, Any]) -> None:
    assert found["losses"] == [[1, 1.0], [2, 2.0]]


def test_a_stop_saves_a_state_only_as_its_own_step(found: dict[str, Any]) -> None:
    """Each value has the message, and the step and the weight of the checkpoint; the weight is its right step."""
    unsaved = "stopped by SIGTERM, unsaved: no rank has sent the state of step"
    assert found["stops"] == {
        "before the first step": ["stopped by SIGTERM before the first step"],
        "while the ranks repeat steps before the last log line": [f"{unsaved} 7; a resume starts at step 0"],
        "while the ranks repeat steps after the last log line": [
            *("stopped by SIGTERM at step 6, which is saved", 6, 6)
        ],
        "an earlier state arrives after a later": ["stopped by SIGTERM at step 7, which is saved", 7, 7],
        "the only state is older than the checkpoint": [f"{unsaved} 5; a resume starts at step 4", 4, 4],
        "the checkpoint has the state": ["stopped by SIGTERM at step 4, which is saved", 4, 4],
    }


def test_a_rank_that_repeats_steps_is_not_killed_when_it_requests_a_group(found: dict[str, Any]) -> None:
    assert found["kills"] == 0
