"""The benchmark still runs: once, for seconds, with --quick. What it measures then is of no meaning."""

from __future__ import annotations

import sys

from harness import ROOT, Harness, bare


def test_what_a_step_costs_beside_a_server_that_stops(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / "trackers.py"), "--quick"])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("\n|") == 5
