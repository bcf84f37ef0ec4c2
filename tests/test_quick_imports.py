"""Test that tools/quick_imports.py compiles equal modules once, and reduces garbage collection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tools" / "quick_imports.py"


def test_modules_are_compiled_once_for_all_environments_that_have_them(tmp_path: Path) -> None:
    contents = {"a/module.py": "VALUE = 1", "b/module.py": "VALUE = 1", "c/module.py": "VALUE = 2"}
    for name, content in contents.items():
        package = tmp_path / Path(name).parent / "package"
        package.mkdir(parents=True)
        cached = tmp_path / "uv" / content[-1]
        cached.parent.mkdir(exist_ok=True)
        cached.write_text(content)
        os.link(cached, package / "__init__.py")
    compiled: list[Path] = []
    for environment in ("a", "b", "c"):
        folder = tmp_path / environment
        words = [str(tmp_path / "store"), str(folder), "package", "missing"]
        environ = {"PYTHONPATH": str(folder)}
        subprocess.run([sys.executable, str(FILE), *words], env=environ, check=True)
        command = [sys.executable, "-c", "import package; print(package.VALUE)"]
        value = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
        assert value.strip() == contents[f"{environment}/module.py"][-1]
        compiled += folder.rglob("*.pyc")
        assert "gc.set_threshold" in (folder / "fewer_collections.pth").read_text()
    first, same, other = compiled
    assert any(each.samefile(same) for each in (tmp_path / "store").iterdir())
    assert same.read_bytes()[16:] == first.read_bytes()[16:] != other.read_bytes()[16:]
