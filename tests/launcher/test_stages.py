"""What may import what: the first stage runs on the system's Python, and ranks need no launcher."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house import CORE, REPOSITORY

APPS = sorted(path.parent.name for path in REPOSITORY.glob("apps/*/options.py"))
MODULES = ["__init__", "__main__", "follower", "launch", "meeting", "supervise", "venvs"]

FIRST_STAGE = """
import importlib.util, sys
sys.path[:0] = sys.argv[1:3]
missing = [name for name in ("numpy", "safetensors", "tqdm", "pytest", "pip") if importlib.util.find_spec(name) is None]
assert "numpy" in missing and "pytest" in missing, "third-party packages can be imported here, so nothing is shown"
from launcher import launch
for app in sys.argv[3:]:
    module = launch._app_options(app)
    module.parse([*list(getattr(module, "COMMANDS", {}))[:1]])
own = {name for name in sys.modules if name.partition(".")[0] in ("launcher", "samestep")}
launchers = {"launcher", *(f"launcher.{name}" for name in ("follower", "launch", "supervise", "venvs"))}
assert own == {"samestep", "samestep.options", *launchers}, own
print("ok")
"""


def interpreters() -> list[str]:
    """This one, and a 3.9 where one works."""
    found = [sys.executable]
    oldest = shutil.which("python3.9")
    if oldest and subprocess.run([oldest, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
        found.append(oldest)
    return found


@pytest.mark.parametrize("python", interpreters())
def test_the_first_stage_needs_only_the_standard_library(python: str) -> None:
    """With every app's options; samestep.{checkpoint,datasets,log,rundir} are for the second stage."""
    paths = [str(REPOSITORY / "scripts"), str(CORE)]
    done = subprocess.run(  # -I and -S: no PYTHONPATH, no site-packages
        [python, "-I", "-S", "-c", FIRST_STAGE, *paths, *APPS], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_the_first_stage_is_written_in_the_language_of_python_3_9(name: str) -> None:
    assert sorted(path.stem for path in (REPOSITORY / "scripts" / "launcher").glob("*.py")) == MODULES
    ast.parse((REPOSITORY / "scripts" / "launcher" / f"{name}.py").read_text(), feature_version=(3, 9))


@pytest.mark.parametrize(
    "path",
    [path for folder in ("core/samestep", "apps") for path in sorted((REPOSITORY / folder).rglob("*.py"))],
    ids=lambda path: "/".join(path.parts[-2:]),
)
def test_what_runs_in_a_rank_imports_nothing_of_the_launcher(path: Path) -> None:
    """The wheel of core has no launcher, and a cluster's image need not have scripts/."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert "launcher" not in [name.partition(".")[0] for name in names]
