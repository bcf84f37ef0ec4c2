"""The tests of an unchanged copy that scripts/new_app.sh makes pass; in the soak in environments of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import APPS
from repository import clone

COPIES = [(app, alone) for app in APPS for alone in (False, True)]
IN_MATRIX = [("mnist_lightning", True)]  # its own tests are the fastest
# The matrix collects all of its tests and runs three: by the launch script, by plain Python, and one that must fail.
SOME = ["-n", "2", "tests/my_copy", "-k", "each_test_image or plain_python or wrong_environment"]


@pytest.mark.parametrize(
    ("app", "alone"),
    [pytest.param(*each, marks=() if each in IN_MATRIX else pytest.mark.soak) for each in COPIES],
    ids=[f"{app} {'alone' if alone else 'in the repository'}" for app, alone in COPIES],
)
def test_the_tests_of_a_copy_pass(tmp_path: Path, app: str, alone: bool, soak: bool) -> None:
    """Run tests/<app>, or some of them; with --soak all, lint and the common tests."""
    root = clone(tmp_path / "samestep")
    place = [f"--out={tmp_path / 'my_copy'}"] if alone else []
    run(root, tmp_path / "copying", 120, "bash", "scripts/new_app.sh", "my_copy", f"--from={app}", *place)
    folder = tmp_path / "my_copy" if alone else root
    if soak:
        words = ["bash", "scripts/test.sh", "-e", "lint,my_copy-cpu" if alone else "my_copy-cpu"]
        run(folder, tmp_path / "testing", 7200, *words)
        return
    # With this environment's packages: to install them takes longer than the tests.
    words = [sys.executable, "-m", "pytest", "--app=my_copy", "--device=cpu", *SOME]
    run(folder, tmp_path / "testing", 300, *words, PYTHON=sys.executable)


def run(folder: Path, output: Path, limit: float, *command: str, **added: str) -> None:
    """Run a command as from a shell, without the variables that tox sets in this process; it must exit with 0."""
    prefixes = ("TOX_", "PYTEST_", "PYTHON", "SAMESTEP_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | added
    with output.open("w") as log:
        # In a session of its own, to end all of it; an app's own tests end the processes that they start.
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, output.read_text()[-20_000:]
