"""The scratch project in which the launch scripts are tested."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from scratch_project import (
    BENCH_OPTIONS,
    CORE,
    OPTIONS,
    PREFIX_OPTIONS,
    REPOSITORY,
    TABLE,
    TABLE_OPTIONS,
    ScratchProject,
    gone,
)

CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="session")
def project_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(CORE, root / "core", ignore=CACHES)
    (root / "scripts").mkdir()
    for door in ("launch.py", "launch.sh"):
        shutil.copy(REPOSITORY / "scripts" / door, root / "scripts")
    apps = {"toy": OPTIONS, "prefix": PREFIX_OPTIONS, "bench": BENCH_OPTIONS, "table": TABLE_OPTIONS}
    for app, options in apps.items():
        (root / "apps" / app).mkdir(parents=True)
        (root / "apps" / app / "options.py").write_text(options)
        (root / "apps" / app / "requirements.in").write_text(f"# {app} needs nothing\n")
        (root / "apps" / app / "requirements-cpu.txt").write_text("# Nothing\n")
    (root / "apps" / "table" / "table.py").write_text(TABLE)
    for name, constant, seconds in (
        ("core/samestep/launch/supervise.py", "STOP_SECONDS", "1.5"),
        ("core/samestep/rundir.py", "LOCK_SECONDS", "0.5"),
        ("core/samestep/launch/preflight.py", "WAIT_NOTICE_AFTER", "1.5"),
    ):
        path = root / name
        text, count = re.subn(rf"^{constant} = [\d.]+", f"{constant} = {seconds}", path.read_text(), flags=re.MULTILINE)
        assert count == 1
        path.write_text(text)
    return root


@pytest.fixture
def project(project_root: Path, tmp_path: Path) -> Iterator[ScratchProject]:
    """At the end of a test nothing that it started may be running."""
    made = ScratchProject(project_root, tmp_path / "work")
    yield made
    left = [] if gone(made.processes) else made.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == [], "processes were left behind"
