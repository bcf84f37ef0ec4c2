"""Test a clone by a Git that converts line ends, as on Windows: .gitattributes must keep LF."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 60  # seconds; every command ends sooner


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone") / "samestep"
    done = run("git", "clone", "--quiet", "--config", "core.autocrlf=true", REPOSITORY, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_file_of_a_clone_with_autocrlf_has_crlf(clone: Path) -> None:
    lines = run("git", "-C", clone, "ls-files", "--eol").stdout.splitlines()
    assert len(lines) > 500
    assert [line for line in lines if "w/crlf" in line or "w/mixed" in line] == []
    assert run("git", "-C", clone, "status", "--porcelain").stdout == ""


def test_each_launch_script_of_such_a_clone_shows_its_help(clone: Path) -> None:
    scripts = sorted(clone.glob("scripts/run_*.sh"))
    assert len(scripts) > 5
    for script in scripts:
        done = run("bash", script, "--help")
        assert done.returncode == 0, done.stderr
        assert "usage: " in done.stdout
