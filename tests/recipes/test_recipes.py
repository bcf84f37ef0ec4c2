"""Apply the changes of docs/recipes.md to its scripts, and test equal losses on 1 and 3 ranks and after a kill."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import walk
from processes import kill_marked, marked
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "recipes.md"
LIMIT = 240.0  # seconds; every run ends sooner
EPOCHS = 2
STEPS = 28  # 1,000 examples in global batches of 37; the last batch has one
SAVED = 20  # steps between checkpoints
SCRIPTS = {
    "accelerate": "docs/recipes/with_accelerate.py",
    "lightning": "docs/recipes/with_lightning.py",
    "trainer": "docs/recipes/with_trainer.py",
    "fsdp2": "docs/own_loop_exact.py",
}
MOST_ADDED = {"accelerate": 9, "lightning": 10, "trainer": 5, "fsdp2": 5}
CHECKPOINTS = {
    "accelerate": "checkpoints/step-00000020",
    "lightning": "last.ckpt",
    "trainer": "checkpoints/step-00000020",
    "fsdp2": "checkpoints/step-00000020",
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the scripts, to which the page's changes are applied."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "docs" / "recipes", folder / "docs" / "recipes")
    shutil.copy(ROOT / "docs" / "own_loop_exact.py", folder / "docs")
    walk.git(folder, "init", "--quiet")
    added = [lines for _, lines, _ in walk.apply_patches(folder, PAGE)]
    assert all(lines <= most for lines, most in zip(added, MOST_ADDED.values())), added
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder. Check at the end of the test that no process marked with the folder is left."""
    yield tmp_path
    left = marked("SAMESTEP_TEST", str(tmp_path))
    kill_marked("SAMESTEP_TEST", str(tmp_path), LIMIT)
    assert left == []


def start(script: Path, world_size: int, folder: Path, out: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a job of torchrun, and return its process and the path of its output."""
    log = folder / f"{out}-{os.urandom(4).hex()}.log"
    options = [f"--epochs={EPOCHS}", "--batch-size=37", "--dtype=float64", f"--out={folder / out}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    variables |= {"SAMESTEP_TEST": str(folder), "PYTHONPATH": str(ROOT / "core")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *options],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return process, log


def run(script: Path, world_size: int, folder: Path, out: str) -> str:
    """Run a job to its end, and return its output."""
    process, log = start(script, world_size, folder, out)
    assert process.wait(timeout=LIMIT) == 0, log.read_text()[-3000:]
    return log.read_text()


def run_until_killed(script: Path, world_size: int, folder: Path, out: str, checkpoint: str) -> str:
    """Kill a job between its first and second save, and return its output.

    A kill during a save damages a file of Lightning, so a job that was killed too late is repeated.
    """
    for _ in range(10):
        shutil.rmtree(folder / out, ignore_errors=True)
        text = _kill_after_save(script, world_size, folder, out, checkpoint)
        if len(losses(text)) < 2 * SAVED - 1:
            return text
    raise AssertionError("in 10 attempts, no kill came before the second save")


def _kill_after_save(script: Path, world_size: int, folder: Path, out: str, checkpoint: str) -> str:
    """Kill a job 3 steps after its first save, and return its output."""
    process, log = start(script, world_size, folder, out)
    deadline = time.monotonic() + LIMIT
    while len(losses(log.read_text())) < SAVED + 3 or not (folder / out / checkpoint).exists():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.01)
    kill_marked("SAMESTEP_TEST", str(folder), LIMIT)
    process.wait(timeout=LIMIT)
    return log.read_text()


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)\n", text)]


def evaluated(text: str) -> list[str]:
    """Return the number of test examples of each evaluation."""
    return re.findall(r"accuracy .*\d+ of (\d+)\)", text)


def weights(out: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(out / "model.pt", weights_only=True)
    return state


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_job_resumes_with_the_losses_of_one_rank(changed: Path, folder: Path, name: str) -> None:
    """Kill 3 ranks in the middle of an epoch.

    The last training batch has one example. Each evaluation counts each of the 999 test examples once.
    """
    script = changed / SCRIPTS[name]
    one = run(script, 1, folder, "one")
    expected = losses(one)
    killed = losses(run_until_killed(script, 3, folder, "three", CHECKPOINTS[name]))
    resumed = run(script, 3, folder, "three")
    first = EPOCHS * STEPS - len(losses(resumed))
    assert first == SAVED
    assert len(expected) == EPOCHS * STEPS
    limit = 1e-6 if name == "trainer" else 1e-12  # Trainer sums its losses in float32
    assert killed[:first] + losses(resumed) == pytest.approx(expected, abs=limit, rel=0)
    assert evaluated(one) == ["999"] * EPOCHS
    assert evaluated(resumed)[-1] == "999"
    others = weights(folder / "three")
    differences = {key: (value - others[key]).abs().max().item() for key, value in weights(folder / "one").items()}
    print(name, max(abs(a - b) for a, b in zip(expected, killed[:first] + losses(resumed))), max(differences.values()))
    assert max(differences.values()) < 1e-12, differences


@pytest.mark.soak  # the test above covers the resume, and this test compares bits
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_job_ends_with_the_same_bits(changed: Path, folder: Path, name: str) -> None:
    script = changed / SCRIPTS[name]
    run(script, 3, folder, "undisturbed")
    run_until_killed(script, 3, folder, "killed", CHECKPOINTS[name])
    run(script, 3, folder, "killed")
    others = weights(folder / "killed")
    assert all(torch.equal(value, others[key]) for key, value in weights(folder / "undisturbed").items())


@pytest.mark.soak  # this test shows that the changes are needed
@pytest.mark.parametrize("name", list(SCRIPTS)[:3])
def test_the_unchanged_script_has_other_losses_at_three_ranks(folder: Path, name: str) -> None:
    script = ROOT / SCRIPTS[name]
    one, three = (losses(run(script, world_size, folder, str(world_size))) for world_size in (1, 3))
    difference = max(abs(a - b) for a, b in zip(one, three))
    print(name, difference)
    assert difference > 1e-3
