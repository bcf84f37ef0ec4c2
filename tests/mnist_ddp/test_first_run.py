"""Run docs/first_run.ipynb unchanged: it trains on 2 ranks, kills one, and draws the losses."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from harness import Harness
from repository import clone


def test_the_notebook_of_the_first_run_shows_a_crash_and_a_resume(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = clone(tmp_path / "samestep")
    for name, value in harness.environ().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(root / "docs" / "first_run.ipynb", as_version=4)
    folder = {"metadata": {"path": str(root / "docs")}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert re.search(r"^warning: the job ended with code 1\b", printed, re.MULTILINE)
    assert re.search(r"^restarts: 1, resumed at step [1-9]\d* of 160$", printed, re.MULTILINE), printed
    assert "equal: True" in printed
    (picture,) = (output.data["image/svg+xml"] for output in outputs if output.output_type == "execute_result")
    whole, killed = re.findall(r'points="(.*?)"', picture)
    assert whole == killed
    assert len(whole.split()) == 40
