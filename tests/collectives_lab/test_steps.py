"""Test that the short programs of steps/, which start ranks in five ways, take the same steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "apps" / "collectives_lab" / "steps"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LIMIT = 120.0  # seconds; every program ends sooner


def losses(name: str, folder: Path, launcher: list[str]) -> list[float]:
    """Return the losses that a program of steps/ prints."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(STEPS / name)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return [float(text) for text in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]


def test_the_five_programs_of_the_tutorial_take_the_same_steps(tmp_path: Path) -> None:
    plain = losses("plain.py", tmp_path, [])
    assert len(plain) == 3
    assert plain[-1] < plain[0]
    for name, launcher in (("data_parallel.py", []), ("process.py", []), ("spawn.py", []), ("launch.py", TORCHRUN)):
        assert losses(name, tmp_path, launcher) == pytest.approx(plain, abs=2e-6), name
