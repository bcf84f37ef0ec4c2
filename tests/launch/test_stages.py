"""Test which modules are imported: the first stage needs only the system's Python, and ranks need no launcher."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import PACKAGES, REPOSITORY
from scratch_project import LAUNCH

APPS = sorted(path.parent.name for path in REPOSITORY.glob("apps/*/options.py"))
FOLDER = LAUNCH / "samestep_launch"
MODULES = ["__init__", "app", "elastic_agent", "environments", "fork_server", "imports", "job", "job_processes"]
MODULES += ["machine", "preemption", "preflight", "process_info", "program", "rank_forker", "run_command"]
MODULES += ["stderr_forwarder", "supervise", "torchrun", "trackers", "user_folder"]

FIRST_STAGE = """
import importlib.util, sys
from pathlib import Path
root, path, *apps = sys.argv[1:]
sys.path[:0] = path.split(":")
missing = [name for name in ("numpy", "safetensors", "tqdm", "pytest", "pip") if importlib.util.find_spec(name) is None]
assert "numpy" in missing and "pytest" in missing, "third-party packages can be imported here, so nothing is shown"
from samestep_launch import app
for name in apps:
    module = app._app_options(Path(root), name)
    module.parse([*list(module.HOOKS.commands)[:1]])
own = {name for name in sys.modules if name.startswith("samestep")}
modules = (
    "app environments fork_server imports job job_processes machine process_info stderr_forwarder supervise trackers "
    "user_folder"
).split()
launch = {"samestep_launch", *(f"samestep_launch.{name}" for name in modules)}
core = "env events failures hooks job_info options root untrusted".split()
needs = {f"samestep.{name}" for name in core}
assert own == {"samestep", *needs, *launch}, own
assert app.__file__.startswith(tuple(path.split(":"))), app.__file__
locks = app.Environment(Path(root), "trackers")
assert "numpy==" in locks.locks()[0].read_text() and locks.pins()
print("ok")
"""


def interpreters() -> list[str]:
    """Return this interpreter, and python3.9 if it works."""
    found = [sys.executable]
    oldest = shutil.which("python3.9")
    if oldest and subprocess.run([oldest, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
        found.append(oldest)
    return found


@pytest.mark.parametrize("python", interpreters())
@pytest.mark.parametrize("zipped", [False, True])
def test_the_first_stage_needs_only_the_standard_library(python: str, zipped: bool, tmp_path: Path) -> None:
    """The first stage reads every app's options, from folders or a zip file, without modules of the second stage."""
    path = [str(REPOSITORY / folder) for folder in PACKAGES]
    if zipped:
        for folder, package in PACKAGES.items():
            shutil.copytree(REPOSITORY / folder / package, tmp_path / "content" / package)
        path = [shutil.make_archive(str(tmp_path / "samestep"), "zip", tmp_path / "content")]
    done = subprocess.run(  # -I and -S: no PYTHONPATH, no site-packages
        [python, "-I", "-S", "-c", FIRST_STAGE, str(REPOSITORY), ":".join(path), *APPS],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_the_first_stage_is_written_in_the_language_of_python_3_9(name: str) -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == MODULES
    ast.parse((FOLDER / f"{name}.py").read_text(), feature_version=(3, 9))


@pytest.mark.parametrize(
    "path",
    [
        path
        for folder in ("core/samestep", "apps")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if not path.is_relative_to(FOLDER)
    ],
    ids=lambda path: "/".join(path.parts[-2:]),
)
def test_what_runs_in_a_rank_imports_nothing_of_the_launcher(path: Path) -> None:
    """Imports within functions count, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names += [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        assert not [name for name in names if name.startswith("samestep_")]
