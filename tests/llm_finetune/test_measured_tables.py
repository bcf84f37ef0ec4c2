"""Test that the tables of the pages have the recorded figures, and that the measurements run."""

from __future__ import annotations

import json
import re
import runpy
import sys
from typing import Any

import pytest
from harness import ROOT, Harness, bare

BENCHMARKS = ROOT / "benchmarks"
README = (ROOT / "apps" / "llm_finetune" / "README.md").read_text()
TRAINER = BENCHMARKS / "finetune_trainer.py"
WAYS = {  # the names in wrong_ways.py, by the second column of the table
    "mean over a rank's targets, then over ranks": "mean over ranks",
    "mean per micro-batch / K": "mean over micro-batches",
    "mean over samples of their means": "mean over samples",
    "a rank's gradients, before the all-reduce": "clipping",
    "from token ids, with the end token as padding": "end as padding",
    "drawn by the rank": "dropout",
    "mean over batches of their means": "evaluation: mean over batches",
}


def recorded(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text())


def test_the_table_of_usual_ways_is_the_recorded_one() -> None:
    found = recorded("finetune_wrong_ways.json")
    rows = dict(re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", README, re.MULTILINE))
    assert {way: rows[way] for way in WAYS} == {way: f"{found[name]:.0e}" for way, name in WAYS.items()}
    assert found["none"] < 1e-12


def test_the_table_of_the_trainer_is_the_recorded_one() -> None:
    """The first two rows are the trainer's defaults, whose results agree with a plain loop."""
    rows = recorded("finetune_trainer.json")["rows"]
    table = runpy.run_path(str(TRAINER))["table"](rows)
    assert table in README
    assert table in (ROOT / "docs" / "scoreboard.md").read_text()
    assert max(row[name] for row in rows[:2] for name in ("loss", "norm", "weights")) < 1e-12


@pytest.mark.soak  # this test trains in five processes
def test_the_trainer_is_still_compared(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, str(TRAINER), "--quick"])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("\n|") == 2
