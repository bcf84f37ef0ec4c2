"""Run the tests of an unchanged copy that scripts/new_app.sh makes. In the soak, the copy makes its environments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import APPS
from repository import clone, run_fresh

IN_MATRIX = "mnist_lightning"  # the quick tests copy only this app, whose tests are the fastest
# The quick tests collect all tests of the copy, and run one with the launch script and two with plain Python.
SOME = ["-n", "2", "tests/my_copy", "-k", "each_test_image or plain_python or wrong_environment"]


def cases() -> Iterator[Any]:
    """Yield a case for each app and each kind of copy: in the repository, or as a project outside of it."""
    for app in APPS:
        yield pytest.param(app, False, id=f"{app} in the repository", marks=pytest.mark.soak)
        marks = []
        if app != IN_MATRIX:
            marks.append(pytest.mark.soak)
        yield pytest.param(app, True, id=f"{app} alone", marks=marks)


@pytest.mark.parametrize(("app", "alone"), cases())
def test_the_tests_of_a_copy_pass(tmp_path: Path, app: str, alone: bool, soak: bool) -> None:
    """Run the copy's lint and some of its tests. With --soak, run all its tests and the common tests."""
    root = clone(tmp_path / "samestep")
    command = ["bash", "scripts/new_app.sh", "my_copy", f"--from={app}"]
    folder = root
    environments = "my_copy-cpu"
    if alone:
        folder = tmp_path / "my_copy"
        command.append(f"--out={folder}")
        environments = "lint,my_copy-cpu"
    run_fresh(root, tmp_path / "copying", 120, *command)
    if soak:
        run_fresh(folder, tmp_path / "testing", 7200, "bash", "scripts/test.sh", "-e", environments)
        return
    run_fresh(folder, tmp_path / "lint", 300, "bash", "scripts/test.sh", "-e", "lint")
    # Use this environment's packages, because an installation is slower than the tests.
    words = [sys.executable, "-m", "pytest", "--app=my_copy", "--device=cpu", *SOME]
    run_fresh(folder, tmp_path / "testing", 300, *words, PYTHON=sys.executable)
