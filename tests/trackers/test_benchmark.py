"""Test that the benchmark runs with --quick; the measurements then have no meaning."""

from __future__ import annotations

import sys

import pytest
from harness import ROOT, Harness, bare


@pytest.mark.soak  # this test starts a server for each variant
def test_the_benchmark_of_a_server_that_stops_prints_its_table(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / "trackers.py"), "--quick"])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("\n|") == 5
