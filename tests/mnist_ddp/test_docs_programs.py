"""Run the programs that docs/ shows, as printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import kill_marked, marked
from samestep import checkpoint
from wheel import build, clean_environment, run

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240.0


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1", "SAMESTEP_TEST": str(folder)}


def kill_all(folder: Path) -> None:
    """Kill every process with the variables of `environ`. torchrun's ranks have their own sessions."""
    kill_marked("SAMESTEP_TEST", str(folder), LIMIT)


def test_a_runs_weights_are_loaded_as_the_page_says(tmp_path: Path) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "inference.md").read_text(), re.M | re.S)[0]
    make = (
        "import sys; sys.path.insert(0, 'apps/mnist_ddp'); import torch; from pathlib import Path; "
        "from model import build_model; from samestep import checkpoint; from samestep.torch import weights; "
        "made = weights.model_arrays(build_model('net', 0.5, torch.float32, 7)); "
        "checkpoint.save_weights(Path(sys.argv[1]), made)\n"
    )
    program = tmp_path / "inference.py"
    program.write_text(make + shown)  # both parts share one import of torch
    command = [sys.executable, str(program), str(tmp_path / "model.safetensors")]
    done = subprocess.run(
        command, cwd=ROOT, env=environ(tmp_path), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    digits = re.fullmatch(r"\[(\d), (\d), (\d)\]\n", done.stdout)
    assert digits, done.stdout
    assert len(set(digits.groups())) == 1  # the three images are equal


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


# --- the wheel alone -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the command ``samestep`` of an environment with the wheel and this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", build(folder).wheel, folder=folder)
    packages = next(folder.glob("venv/lib/python*/site-packages"))
    (packages / "packages.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    where = run(python, "-c", "import samestep; print(samestep.__file__)", folder=folder).strip()
    assert Path(where).is_relative_to(folder)
    return folder / "venv" / "bin" / "samestep"


def start(installed: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    shutil.copy(ROOT / "docs" / "own_loop_run.py", folder)
    command = [str(installed), "run", "-n", "2", "--run-dir=run", "own_loop_run.py", *options]
    mine = clean_environment(SAMESTEP_TEST=str(folder), OMP_NUM_THREADS="1")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=mine, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_for_step(job: subprocess.Popen[str], folder: Path, step: int) -> None:
    until = time.monotonic() + LIMIT
    while not any(int(kept.name[5:]) >= step for kept in checkpoint.folders(folder / "run")):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.soak  # the quick tests run the page's own commands
def test_the_wheel_alone_runs_a_loop_with_a_run(installed: Path, folder: Path) -> None:
    """A killed rank causes one restart. At TERM, the job saves the step and leaves no process running."""
    options = ("--epochs=40", "--checkpoint-every=50", "--max-steps=600")
    job = start(installed, folder, *options)
    wait_for_step(job, folder, 50)
    os.kill(json.loads((folder / "run" / "log" / "alive-1").read_text())["pid"], signal.SIGKILL)
    out, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, errors
    assert "starting it again (1 of 3)" in errors
    recovered = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert (recovered["restarts"], recovered["steps"], recovered["world_size"]) == (1, 600, 2)
    assert recovered["resumed_from_step"] >= 50
    assert recovered["test_accuracy"] > 0.85

    shutil.rmtree(folder / "run")
    job = start(installed, folder, *options)
    wait_for_step(job, folder, 50)
    job.send_signal(signal.SIGTERM)
    out, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 143, errors
    stopped = re.search(r"^stopped by SIGTERM at step (\d+), which is saved$", out, re.MULTILINE)
    assert stopped, out
    assert checkpoint.folders(folder / "run")[0].name == f"step-{int(stopped[1]):08}"
    assert not marked("SAMESTEP_TEST", str(folder))
    out, errors = start(installed, folder, *options).communicate(timeout=LIMIT)
    assert json.loads(out.splitlines()[-1].removeprefix("RESULT "))["weights_sha256"] == recovered["weights_sha256"]
