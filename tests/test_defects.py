"""Test that each defect of tests/defects still applies to the code."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
RUN = runpy.run_path(str(TESTS / "defects" / "run.py"))
DEFECTS: list[dict[str, Any]] = RUN["defects"]()


def test_there_are_27_defects_of_which_ten_are_blind() -> None:
    assert len({defect["name"] for defect in DEFECTS}) == len(DEFECTS) == 27
    assert sum(defect.get("blind", False) for defect in DEFECTS) == 10


@pytest.mark.parametrize("defect", DEFECTS, ids=[defect["name"] for defect in DEFECTS])
def test_a_defect_still_applies(defect: dict[str, Any]) -> None:
    path = TESTS.parent / defect["file"]
    compile(RUN["with_defect"](path.read_text(), defect), path, "exec")
    assert defect["tests"]
    assert all((TESTS.parent / path).exists() for _, *paths in defect["tests"] for path in paths)
