"""tools/share_files.py makes one file of equal ones in two environments, whatever their names, and compiles modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tools" / "share_files.py"


def test_large_files_that_are_equal_become_one(tmp_path: Path) -> None:
    contents = {"a/large": b"x" * 100_000, "b/same": b"x" * 100_000, "b/other": b"y" * 100_000, "a/small": b"z"}
    contents["b/small"] = contents["a/small"]
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for folder in ("a", "b", "a"):
        subprocess.run([sys.executable, str(FILE), str(tmp_path / "store"), str(tmp_path / folder)], check=True)
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents
    assert (tmp_path / "a/large").samefile(tmp_path / "b/same")
    assert not (tmp_path / "a/small").samefile(tmp_path / "b/small")
    assert len([*(tmp_path / "store").iterdir()]) == 2


def test_the_modules_that_an_environment_has_are_compiled(tmp_path: Path) -> None:
    for package in ("first", "second"):
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").touch()
    words = [str(tmp_path / "store"), str(tmp_path / "packages"), "first", "missing"]
    environ = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path / "packages")}
    subprocess.run([sys.executable, str(FILE), *words], env=environ, check=True)
    assert [path.parent.parent.name for path in tmp_path.glob("packages/*/__pycache__/*.pyc")] == ["first"]
