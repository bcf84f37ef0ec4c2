"""Test that each attempt to break a launch script ends with the expected message and exit code."""

from __future__ import annotations

import pytest
from attempts import Attempt, check
from scratch_project import ScratchProject

ATTEMPTS = [
    Attempt(
        23, "a run dir that is a file", 2, r"--run-dir \S+ is not a directory", arguments=("2", "--run-dir=/etc/passwd")
    ),
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=str)
def test_an_attempt_ends_as_the_table_says(project: ScratchProject, attempt: Attempt) -> None:
    check(project, attempt)
