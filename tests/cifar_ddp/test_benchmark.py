"""Run the benchmark of time to accuracy on a small dataset."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT


@pytest.mark.soak
@pytest.mark.parametrize(("way", "rows"), [([], 2), (["--inputs"], 1), (["--shares"], 1)])
def test_the_benchmark_still_runs(data_dir: Path, way: list[str], rows: int) -> None:
    """Run four steps of the app and of each program to compare; the results have no meaning."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "time_to_accuracy.py"), "--quick", f"--data-dir={data_dir}", *way],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") > rows
