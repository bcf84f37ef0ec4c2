"""The programs that docs/ shows, run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import marked
from samestep import checkpoint

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240.0


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1", "SAMESTEP_TEST": str(folder)}


def kill_all(folder: Path) -> None:
    """Every process of `environ`: torchrun's ranks have sessions of their own, and outlive it."""
    until = time.monotonic() + LIMIT
    while left := marked("SAMESTEP_TEST", str(folder)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_runs_weights_are_loaded_as_the_page_says(tmp_path: Path) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "inference.md").read_text(), re.M | re.S)[0]
    make = (
        "import sys; sys.path.insert(0, 'apps/mnist_ddp'); import torch, weights; from pathlib import Path; "
        "from model import build_model; from samestep import checkpoint; "
        "made = weights.model_arrays(build_model('net', 0.5, torch.float32, 7)); "
        "checkpoint.save_weights(Path(sys.argv[1]), made)\n"
    )
    program = tmp_path / "inference.py"
    program.write_text(make + shown)  # one start of torch for both
    command = [sys.executable, str(program), str(tmp_path / "model.safetensors")]
    done = subprocess.run(
        command, cwd=ROOT, env=environ(tmp_path), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    digits = re.fullmatch(r"\[(\d), (\d), (\d)\]\n", done.stdout)
    assert digits, done.stdout
    assert len(set(digits.groups())) == 1  # three equal images


def torchrun(folder: Path, run_dir: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "docs" / "own_loop.py"), run_dir, str(steps)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ(folder), stdout=pipe, stderr=pipe, text=True)


def last_line(job: subprocess.Popen[str]) -> str:
    out, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, errors
    return out.splitlines()[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


@pytest.mark.soak
def test_a_loop_of_ones_own_goes_on_to_the_same_weights(folder: Path) -> None:
    undisturbed = last_line(torchrun(folder, "undisturbed", 80))
    assert re.fullmatch("80 [0-9a-f]{64}", undisturbed)
    assert last_line(torchrun(folder, "resumed", 40)).startswith("40 ")
    assert last_line(torchrun(folder, "resumed", 80)) == undisturbed
    # Killed after its first checkpoint, and started again.
    job = torchrun(folder, "killed", 100_000)
    until = time.monotonic() + LIMIT
    while not checkpoint.folders(folder / "killed"):
        assert job.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    kill_all(folder)
    job.communicate(timeout=LIMIT)
    step = max(int(kept.name[5:]) for kept in checkpoint.folders(folder / "killed"))
    whole = last_line(torchrun(folder, "whole", step + 20))
    assert last_line(torchrun(folder, "killed", step + 20)) == whole
