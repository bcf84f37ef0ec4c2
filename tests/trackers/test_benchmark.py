"""The benchmark still runs: once, for seconds, with --quick. What it measures then is of no meaning."""

from __future__ import annotations

import sys

import pytest
from harness import ROOT, Harness, bare


@pytest.mark.soak  # it starts a server for each of its variants
def test_what_a_step_costs_beside_a_server_that_stops(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / "trackers.py"), "--quick"])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("\n|") == 5
