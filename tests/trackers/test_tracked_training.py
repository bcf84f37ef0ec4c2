"""Test --track with killed runs: each tracker has one run with each step once, and training does not wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, Job, last_step, metrics
from processes import free_port
from readback import OF, written

NAMES = "tensorboard,mlflow,wandb"
SMALL = ("--dataset=mnist-5k", "--log-every=1", "--checkpoint-every=10")
PATIENT: dict[str, Any] = {"SAMESTEP_TRACK_SECONDS": "200"}  # for a busy machine


def kill_at(job: Job, steps: list[int]) -> None:
    """Kill a rank at each of these steps or a few steps later, and wait for the restart."""

    def others_came(gone: set[int]) -> bool:
        now = {*job.ranks().values()}
        return len(now) == 2 and not gone & now

    for i, step in enumerate(steps):
        job.wait_for(partial(reached, job, step), limit=240)
        before = job.ranks()
        os.kill(before[i % 2], signal.SIGKILL)
        job.wait_for(partial(others_came, {*before.values()}), limit=240)


def reached(job: Job, step: int) -> bool:
    return last_step(job.run_dir) >= step


def check(run_dir: Path) -> None:
    expected = written(run_dir)
    assert [step for step, _ in expected["loss"]] == [line["step"] for line in metrics(run_dir)]
    for name, read in OF.items():
        assert read(run_dir) == expected, name


def tracker_processes(harness: Harness) -> list[int]:
    return [pid for pid, command in harness.left_running().items() if "samestep.__main__" in command]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_a_run_that_is_killed_is_one_run_in_each_tracker(harness: Harness, kills: int) -> None:
    steps = [15 + 20 * i for i in range(kills)]
    options = [*SMALL, f"--track={NAMES}", f"--max-restarts={kills}", f"--max-steps={steps[-1] + 15}", "--epochs=30"]
    job = harness.start(2, *options, **PATIENT)
    kill_at(job, steps)
    result = harness.checked(job.finish(), 2)
    assert result["restarts"] == kills
    assert [line["step"] for line in metrics(job.run_dir)] == list(range(1, result["steps"] + 1))
    check(job.run_dir)


def test_if_the_tracker_process_dies_the_rest_is_copied_at_the_end(harness: Harness) -> None:
    job = harness.start(2, *SMALL, "--track=tensorboard,wandb", "--max-steps=60", **PATIENT)
    job.wait_for_step(5)
    (process,) = job.wait_for(lambda: tracker_processes(harness))
    os.kill(process, signal.SIGKILL)
    outcome = job.finish()
    assert outcome.stderr.count("warning: --track: ") == 1
    assert "its process ended with code -9" in outcome.stderr
    harness.checked(outcome, 2)
    for name in ("tensorboard", "wandb"):
        assert OF[name](job.run_dir) == written(job.run_dir)


def test_if_the_server_is_down_training_succeeds_and_names_the_command_for_the_rest(harness: Harness) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    options = [*SMALL, "--track=mlflow,tensorboard", "--max-steps=30"]
    outcome = harness.run(2, *options, MLFLOW_TRACKING_URI=uri, **PATIENT)
    result = harness.checked(outcome, 2)
    (warning,) = [line for line in outcome.stderr.splitlines() if line.startswith("warning: --track: ")]
    assert warning.startswith("warning: --track: mlflow is incomplete (")
    run_dir = Path(result["run_dir"])
    assert OF["tensorboard"](run_dir) == written(run_dir)
    command = warning.partition("to complete it, run ")[2]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done  # MLflow without a server writes to a database
    assert OF["mlflow"](run_dir) == written(run_dir)


@pytest.mark.soak
def test_if_the_script_is_killed_its_tracker_process_ends_and_the_next_one_continues(harness: Harness) -> None:
    job = harness.start(2, *SMALL, "--track=tensorboard", "--max-steps=60", **PATIENT)
    job.wait_for_step(12)
    job.wait_for(lambda: tracker_processes(harness))
    job.process.kill()
    result = harness.checked(harness.run(2, *SMALL, "--track=tensorboard", "--max-steps=60", **PATIENT), 2)
    assert OF["tensorboard"](Path(result["run_dir"])) == written(Path(result["run_dir"]))
    assert json.loads((Path(result["run_dir"]) / "result.json").read_text()) == result


@pytest.mark.soak  # the quick tests resume a killed run
def test_a_run_that_resumes_at_another_world_size_stays_one_run_in_each_tracker(harness: Harness) -> None:
    options = [*SMALL, f"--track={NAMES}", "--max-steps=40"]
    job = harness.start(2, *options, **PATIENT)
    job.wait_for_step(12)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.finish().code == 128 + signal.SIGTERM
    check(job.run_dir)
    harness.checked(harness.run(3, *options, run_dir=job.run_dir, **PATIENT), 3)
    check(job.run_dir)
