"""Copy the repository in its present state, for tests that write into the copy."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = {  # by folder; the folders are on Python's path
    "core": "samestep",
    "launch": "samestep_launch",
    "observe": "samestep_observe",
    "check": "samestep_check",
}


def without_git() -> dict[str, str]:
    """Return the environment without git's variables, which name another repository if a git hook runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def clone(root: Path) -> Path:
    """Copy the tracked and the new files to ``root``, add them to a new git repository there, and return ``root``."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, root / name)
    for words in (["init", "--quiet"], ["add", "--all", "--force"]):
        subprocess.run(["git", *words], cwd=root, env=without_git(), check=True, capture_output=True)
    return root


Ended = subprocess.CompletedProcess[str]


def ran(folder: Path, *command: str, environ: Mapping[str, str], limit: float = 120, **settings: Any) -> Ended:
    """Run a command, and return the finished process with any exit code."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        **settings,
    )


def run_fresh(folder: Path, output: Path, limit: float, *command: str, **added: str) -> None:
    """Run a command as from a shell, without the variables of tox, pytest and Python. It must exit with 0."""
    prefixes = ("TOX_", "PYTEST_", "PYTHON", "SAMESTEP_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | added
    with output.open("w") as log:
        # A new session lets killpg end the command's children; an app's own tests end the processes that they start.
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, output.read_text()[-20_000:]
