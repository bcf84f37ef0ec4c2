"""Run the row of tools/gpu_proof.sh for this app in a short form, on a CPU over gloo."""

from __future__ import annotations

import sys
import time

import pytest
from harness import ROOT, Harness

sys.path.insert(0, str(ROOT / "tools"))
from gpu_proof.finetune import finetune
from gpu_proof.jobs import Proof, Row, Slots

SECONDS = 600.0


@pytest.mark.soak  # this test starts eight jobs that import transformers
def test_the_row_passes_on_a_cpu(harness: Harness) -> None:
    proof = Proof(harness.folder, "cpu", True, None, None, SECONDS, time.monotonic() + SECONDS, Slots(2))
    figures = finetune(Row(proof, "a row"))
    assert (figures["model"], figures["backend"]) == ("tiny", "gloo")
    assert figures["tokens per second at 2"] > 0
