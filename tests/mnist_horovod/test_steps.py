"""Test that the tutorial's twenty lines in apps/mnist_horovod/steps do not change the program's steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from harness import Harness, bare

STEPS = Path(__file__).resolve().parents[2] / "apps" / "mnist_horovod" / "steps"
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2"]


def losses(harness: Harness, *command: str) -> list[float]:
    outcome = bare(harness, [*command])
    assert outcome.code == 0, outcome
    return [float(text) for text in re.findall(r"step \d+ loss (\S+)$", outcome.stdout, re.MULTILINE)]


def test_the_tutorials_program_takes_the_steps_of_the_program_before_it(harness: Harness) -> None:
    before = losses(harness, sys.executable, str(STEPS / "before.py"))
    assert len(before) == 3
    tutorial = losses(harness, *HOROVODRUN, sys.executable, str(STEPS / "tutorial.py"))
    assert tutorial == pytest.approx(before, abs=2e-6)
