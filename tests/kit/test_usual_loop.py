"""Test that the README's diff applies to docs/usual_loop.py, and makes losses independent of the world size."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit_programs import LIMIT, ROOT, environment

PICTURE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "first_picture.py"))


def losses_of(program: Path, count: int, folder: Path) -> list[float]:
    """Return the losses of an epoch in float64 with ``count`` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [str(program), "--epochs=1", "--dtype=float64", f"--out={folder / f'{program.stem}-{count}'}"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[float] = PICTURE["losses"](done.stdout)
    return found


def test_the_diff_of_the_readme_makes_the_losses_equal_at_any_number_of_ranks(tmp_path: Path) -> None:
    usual = ROOT / "docs" / "usual_loop.py"
    diff = PICTURE["diff_of_the_page"]((ROOT / "README.md").read_text())
    changed = tmp_path / "changed.py"
    changed.write_text(PICTURE["changed"](usual.read_text(), diff))
    before = [losses_of(usual, count, tmp_path) for count in (1, 2)]
    after = [losses_of(changed, count, tmp_path) for count in (1, 2, 3)]
    assert len(after[0]) == 32
    assert before[1] != pytest.approx(before[0], rel=1e-3)
    assert after[1] == pytest.approx(after[0], rel=1e-12)
    assert after[2] == pytest.approx(after[0], rel=1e-12)
