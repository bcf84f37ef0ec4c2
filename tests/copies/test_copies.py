"""The tests of an unchanged copy that scripts/new_app.sh makes pass, in environments of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
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
    run(root, tmp_path / "copying", 120, "scripts/new_app.sh", "my_copy", f"--from={app}", *place)
    own = SOME if (app, alone) in IN_MATRIX else ["tests/my_copy"]
    words = ["-e", "lint,my_copy-cpu" if alone and soak else "my_copy-cpu", *([] if soak else ["--", *own])]
    run(tmp_path / "my_copy" if alone else root, tmp_path / "testing", 7200, "scripts/test.sh", *words)


def run(folder: Path, output: Path, limit: float, *words: str) -> None:
    """Run a script as from a shell, without the variables that tox sets in this process; it must exit with 0."""
    prefixes = ("TOX_", "PYTEST_", "PYTHON", "SAMESTEP_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    command = ["bash", *words]
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
