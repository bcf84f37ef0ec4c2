"""Test that a copy of cifar_ddp with the patches of docs/make_it_yours.md trains correctly.

tests/test_walk.py tests that the patches apply and that the page counts them correctly.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import walk
from amounts import amount
from harness import ROOT, Harness, Job, losses, metrics, relative_difference
from repository import clone, ran, run_fresh

PAGE = ROOT / "docs" / "make_it_yours.md"
LIMIT = 120
# Options of a small run that uses every part of the step.
SMALL = (
    *("--max-steps=8", "--global-batch-size=61", "--log-every=1", "--optimizer=adamw", "--warmup-steps=3"),
    *("--clip-norm=1", "--accumulate=3", "--ema=0.9"),
)
# PLAINLY evaluates the final weights of a run in one process, by the definition of the metric.
PLAINLY = """
import json, sys
import numpy as np, torch
from model import CLASSES, build_model
from options import parse
from safetensors.torch import load_file
from data import load
options = parse(["--dataset=shapes", "--dtype=float64"])
model = build_model(options, torch.float64).eval()
model.load_state_dict(load_file(sys.argv[1]))
test = load(options, torch.device("cpu"))[1]
images, labels = test.batch(np.arange(len(test)))
predicted = model(images).argmax(1).tolist()
scores = []
for label in range(CLASSES):
    pairs = [(each == label, true == label) for each, true in zip(predicted, labels.tolist())]
    right, wrong = sum(a and b for a, b in pairs), sum(a != b for a, b in pairs)
    scores.append(2 * right / (2 * right + wrong) if right + wrong else 0.0)
print(json.dumps([sum(scores) / CLASSES, len(labels)]))
"""


def run(folder: Path, *command: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = ran(folder, *command, environ=environ, limit=LIMIT)
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of the repository that contains my_app with the page's changes and data."""
    root = clone(tmp_path_factory.mktemp("walk") / "samestep")
    run(root, "bash", "scripts/new_app.sh", "my_app", "--from", "cifar_ddp")
    walk.apply_patches(root, PAGE)
    run(root, sys.executable, "apps/my_app/make_shapes.py")
    return root


@pytest.fixture
def start(harness: Harness, copy: Path) -> Callable[..., Job]:
    def start(n: int, run_dir: str, *options: str) -> Job:
        folder = harness.folder / run_dir
        script = ["bash", str(copy / "scripts" / "run_my_app.sh"), str(n), f"--run-dir={folder}", *SMALL, *options]
        # The copy's core precedes the installed core on Python's path.
        return harness.start_command(script, folder, copy, PYTHONPATH=str(copy / "core"))

    return start


def result(job: Job) -> dict[str, Any]:
    outcome = job.finish()
    assert outcome.code == 0, outcome
    return outcome.result


def test_the_changed_copy_takes_the_same_steps_at_any_number_of_ranks(
    copy: Path, start: Callable[..., Job], harness: Harness, soak: bool
) -> None:
    """Compare losses at two world sizes, the metric with a plain computation and, in a soak, a killed run's weights."""
    n = amount(soak, few=2, many=3)
    options = ["--dtype=float64", "--max-steps=24", "--checkpoint-every=3"]
    jobs = [start(ranks, f"exact-{ranks}", *options) for ranks in (1, n)]
    one, several = (result(job) for job in jobs)
    assert (one["dataset"], one["test_examples"]) == ("shapes", 320)
    curves = [losses(harness.folder / f"exact-{ranks}") for ranks in (1, n)]
    assert len(curves[0]) == 24
    assert relative_difference(*curves) < 1e-9
    assert min(curves[0][1:]) < curves[0][0]

    evaluated = Path(several["run_dir"]) / "model-ema.safetensors"
    found, examples = json.loads(run(copy / "apps" / "my_app", sys.executable, "-c", PLAINLY, str(evaluated)))
    assert examples == several["test_examples"]
    assert several["test_macro_f1"] == pytest.approx(found, abs=1e-12)
    assert one["test_macro_f1"] == several["test_macro_f1"]

    if not soak:
        return
    job = start(n, "killed", *options)
    job.wait_for_step(5)
    os.kill(job.ranks()[1], signal.SIGKILL)
    killed = result(job)
    assert killed["restarts"] == 1
    assert killed["weights_sha256"] == several["weights_sha256"]
    lines = [line for line in metrics(Path(killed["run_dir"])) if "test_loss" in line]
    assert [line["step"] for line in lines] == [16]  # the end of an epoch
    assert lines[0]["test_macro_f1"] > 0


@pytest.mark.soak  # the quick tests run these tests for cifar_ddp
def test_the_own_tests_of_the_changed_copy_pass(copy: Path, tmp_path: Path) -> None:
    """The page does not change the copy's tests, which read the data, the metric and the tolerance from app_spec.py."""
    words = [sys.executable, "-m", "pytest", "--app=my_app", "--device=cpu", "-n", "2", "tests/my_app"]
    run_fresh(copy, tmp_path / "output", 600, *words, PYTHON=sys.executable)
