"""Test docs/make_it_yours.md: patches apply to a copy of the app, the table counts them, and layout tests pass.

tests/cifar_ddp/test_make_it_yours.py trains the changed copy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import walk
from repository import REPOSITORY, clone, ran

PAGE = REPOSITORY / "docs" / "make_it_yours.md"


def run(folder: Path, *command: str) -> None:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = ran(folder, *command, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "alone", [pytest.param(False, id="in the repository"), pytest.param(True, id="alone", marks=pytest.mark.soak)]
)
def test_the_changes_of_the_page_are_as_large_as_it_says(tmp_path: Path, alone: bool) -> None:
    root = clone(tmp_path / "samestep")
    wheel = tmp_path / "samestep-0.2.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    place = ["--out", str(tmp_path / "mine"), "--wheel", str(wheel)] if alone else []
    run(root, "bash", "scripts/new_app.sh", "my_app", "--from", "cifar_ddp", *place)
    changed = tmp_path / "mine" if alone else root
    assert walk.apply_patches(changed, PAGE) == walk.table(PAGE)
    for words in (["check"], ["format", "--check"]):
        run(changed, sys.executable, "-m", "ruff", *words, "--no-cache", ".")
    if not alone:
        tests = ["tests/test_layout.py", "tests/test_no_pickle.py"]
        run(root, sys.executable, "-m", "pytest", "-q", *tests, "-k", "not ddp_and")
