"""Test parts of the launcher and of a member without a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import Harness, bare

PROGRAM = Path(__file__).with_name("parts.py")


def cases(harness: Harness) -> dict[str, Any]:
    """Run parts.py, and return the JSON that it printed."""
    outcome = bare(harness, [sys.executable, str(PROGRAM)])
    assert outcome.code == 0, outcome
    found: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
    return found


def test_members_are_ordered_ranks_numbered_and_pauses_measured(harness: Harness) -> None:
    found = cases(harness)
    # Rank 0 is the oldest member with the highest progress and the most frequent state. Members behind come last.
    assert found["order"] == ["000003", "000005", "000001", "000000"]
    # A number is free if no rank has it or its rank has left. An exit code is known once the connection has ended.
    assert found["free"] == [3, 1]
    assert found["exit codes"] == [None, 7]
    # An update counts once. A pause lasts from the last update before it to the next update.
    assert found["steps"] == [1, 2]
    assert found["result"]["members"] == [{"step": 0, "ranks": [1, 2]}, {"step": 1, "ranks": [1]}]
    assert len(found["result"]["pauses"]) == 1
