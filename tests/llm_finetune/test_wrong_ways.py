"""Test that the usual ways to write a step change the training, and that core does not mention the app's packages."""

from __future__ import annotations

import re

import pytest
from harness import ROOT, told_by

WAYS = {
    "mean over ranks",
    "mean over micro-batches",
    "mean over samples",
    "clipping",
    "end as padding",
    "dropout",
    "evaluation: mean over batches",
}


@pytest.mark.soak  # this test takes minutes on a busy machine
def test_the_usual_ways_make_another_training() -> None:
    found = told_by("llm_finetune", "import wrong_ways; wrong_ways.main()")
    assert found.pop("none") < 1e-12
    assert found.keys() == WAYS
    assert min(found.values()) > 1e-5, found


def test_the_core_knows_neither_this_app_nor_its_packages() -> None:
    pattern = re.compile(r"llm_finetune|transformers|peft|LoRA", re.IGNORECASE)
    checks_of_trainer = ROOT / "core/samestep/torch/trainer.py"
    for path in {*(ROOT / "core").rglob("*.py")} - {checks_of_trainer}:
        assert not pattern.search(path.read_text()), path
