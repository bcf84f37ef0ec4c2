"""Provide fixtures for the tests of resnet50_mindspore."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT

APP = ROOT / "apps" / "resnet50_mindspore"


@pytest.fixture
def ascend_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the globals of options.py on a machine that appears to have Ascend's driver."""
    found = runpy.run_path(str(APP / "options.py"))
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setitem(found["parse"].__globals__, "ASCEND_DRIVER", tmp_path / "davinci_manager")
    return found
