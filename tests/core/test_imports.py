"""Core is thin: what a rank of the smallest app loads of it can be read in an hour, and none of it is a framework."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CORE, LIMIT, environment

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 2400  # of the package, in a rank of mnist_ddp
FRAMEWORKS = "torch torchvision lightning pytorch_lightning horovod paddle mindspore tensorflow jax".split()

IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""


def named(app: str) -> set[str]:
    """The modules of the package that an app's files import."""
    found: set[str] = set()
    for path in (ROOT / "apps" / app).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "samestep"}
    ours = {name for name in found if name.split(".")[0] == "samestep"}
    return {name for name in ours if Path(CORE, *name.split(".")).with_suffix(".py").exists()}


@pytest.fixture(scope="module")
def loaded() -> dict[str, str | None]:
    """All modules of a process that has imported what mnist_ddp names of the package, and their files."""
    names = sorted(named("mnist_ddp"))
    assert {"samestep.run", "samestep.options", "samestep.sharding"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *names],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def test_what_a_rank_of_the_smallest_app_loads_of_the_package_stays_thin(loaded: dict[str, str | None]) -> None:
    ours = {name: Path(file) for name, file in loaded.items() if file and name.split(".")[0] == "samestep"}
    assert {"samestep", "samestep.run", "samestep.checkpoint", "samestep.recovery.watchdog"} <= ours.keys()
    assert all(path.is_relative_to(CORE) for path in ours.values())
    lines = {name: len(path.read_text().splitlines()) for name, path in ours.items()}
    assert sum(lines.values()) <= MOST_LINES, lines


def test_what_a_rank_loads_of_the_package_holds_no_framework_no_launcher_and_no_downloads(
    loaded: dict[str, str | None],
) -> None:
    tops = {name.split(".")[0] for name in loaded}
    assert not tops & {*FRAMEWORKS, "launcher"}
    ours = {name for name in loaded if name.split(".")[0] == "samestep"}
    assert not ours & {f"samestep.{name}" for name in ("download", "launch", "supervise", "venvs")}


@pytest.mark.parametrize("path", sorted(Path(CORE, "samestep").glob("*.py")), ids=lambda path: path.stem)
def test_no_module_of_the_package_names_a_framework_or_the_launcher(path: Path) -> None:
    """Not even within a function, where the import would come later."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & {*FRAMEWORKS, "launcher"}, ast.unparse(node)
