"""Test that the smallest app imports few modules of the package, and that only samestep.torch imports a framework."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CORE, LIMIT, environment

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted(path for path in Path(CORE, "samestep").rglob("*.py") if path.parent.name != "torch")
FRAMEWORKS = "torch torchvision lightning pytorch_lightning horovod paddle mindspore tensorflow jax".split()

IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""


def imported_modules(app: str) -> set[str]:
    """Return the modules of the package that an app's files import."""
    found: set[str] = set()
    for path in (ROOT / "apps" / app).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in found if name.split(".")[0] == "samestep"}
    return {name for name in ours if Path(CORE, *name.split(".")).with_suffix(".py").exists()}


@pytest.fixture(scope="module")
def loaded() -> dict[str, str | None]:
    """Import the package's modules that mnist_ddp imports, and return all modules that are then loaded.

    `samestep.torch` is left out, because this environment lacks torch; a test in tests/common checks its modules.

    Returns: ``{module: its file, or None}``.
    """
    names = sorted(name for name in imported_modules("mnist_ddp") if not name.startswith("samestep.torch"))
    assert {"samestep.run", "samestep.options", "samestep.env"} <= set(names)
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


def test_the_smallest_app_imports_a_thin_part_of_the_package(loaded: dict[str, str | None]) -> None:
    ours = {name: Path(file) for name, file in loaded.items() if file and name.split(".")[0] == "samestep"}
    assert {"samestep", "samestep.run", "samestep.checkpoint", "samestep.recovery.watchdog"} <= ours.keys()
    assert all(path.is_relative_to(CORE) for path in ours.values())
    assert not {"samestep.sharded", "samestep.data.download", "samestep.recovery.hang_diagnosis"} & ours.keys()


def test_an_app_imports_no_framework_no_launcher_and_no_downloads_by_the_package(
    loaded: dict[str, str | None],
) -> None:
    tops = {name.split(".")[0] for name in loaded}
    assert not tops & {*FRAMEWORKS}
    assert not [name for name in tops if name.startswith("samestep_")]
    assert "samestep.data.download" not in loaded


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(CORE)))
def test_no_module_of_the_package_names_a_framework(path: Path) -> None:
    """Imports within functions count, too. Frameworks belong in samestep.torch; `lint-imports` checks the layers."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & {*FRAMEWORKS}, ast.unparse(node)
