"""Test that Horovod takes the same steps over MPI as over gloo, by horovodrun and by mpirun, also after a kill.

The tox environments mnist_horovod-mpi and mnist_horovod-mpich run these tests with Open MPI and MPICH.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import ROOT, Harness, Job, bare, last_step, losses, relative_difference

TRAIN = str(ROOT / "apps" / "mnist_horovod" / "train.py")
VERIFY = str(ROOT / "scripts" / "verify_horovod.sh")
BIN = Path(sys.executable).parent
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]


@cache
def mpirun() -> list[str]:
    """Return mpirun with its options. Open MPI needs options to run as root and to share processors."""
    version = subprocess.run(
        [BIN / "mpirun", "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    more = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else []
    return [str(BIN / "mpirun"), *more]


def by_mpirun(harness: Harness, n: int, *options: str, run_dir: Path) -> Job:
    command = [*mpirun(), "-np", str(n), sys.executable, TRAIN, f"--run-dir={run_dir}", *options]
    return harness.start_command(command, run_dir)


def result_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


@pytest.mark.soak  # the quick tests compare the weights of 2 ranks (test_a_killed_rank_changes_nothing)
def test_the_losses_are_gloos(harness: Harness) -> None:
    """Losses agree in float64, with a global batch that neither 2 nor 3 divides. One build has both transports."""
    steps = 40
    options = [*harness.app.exact, "--global-batch-size=125", f"--max-steps={steps}"]
    for n in (2, 3):
        expected = harness.train(n, *options, run_dir=harness.folder / f"gloo-{n}")
        assert (expected["launcher"], expected["backend"]) == ("horovodrun", "gloo")
        curve = losses(harness.folder / f"gloo-{n}")
        assert len(curve) == steps

        found = harness.train(n, *options, "--transport=mpi", run_dir=harness.folder / f"horovodrun-{n}")
        assert found["backend"] == "mpi"
        assert relative_difference(curve, losses(harness.folder / f"horovodrun-{n}")) < 1e-9

        run_dir = harness.folder / f"mpirun-{n}"
        harness.checked(by_mpirun(harness, n, *options, run_dir=run_dir).finish(), n)
        assert result_of(run_dir)["backend"] == "mpi"  # mpirun starts the ranks, so --transport is not needed
        assert relative_difference(curve, losses(run_dir)) < 1e-9


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_killed_rank_changes_nothing(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, n: int
) -> None:
    """The launch script restarts the job. MPI and gloo compute the same bits for the sum of 2 ranks."""
    expected = undisturbed(n, *([] if n == 2 else ["--transport=mpi"]))
    for i in range(amount(soak, few=1, many=5)):
        job = harness.start(n, *harness.app.small, "--transport=mpi", run_dir=harness.folder / str(i))
        job.wait_for_step(8 + i)
        os.kill(job.alive(n - 1)["pid"], signal.SIGKILL)
        result = harness.checked(job.finish(), n)
        assert (result["restarts"], result["backend"]) == (1, "mpi")
        assert result["launcher"] in ("openmpi", "mpich")
        assert result["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.soak  # the quick tests kill a rank (test_a_killed_rank_changes_nothing)
def test_a_killed_rank_ends_mpirun_and_the_next_start_resumes(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    run_dir = harness.folder / "run"
    job = by_mpirun(harness, 2, *harness.app.small, run_dir=run_dir)
    job.wait_for_step(8)
    os.kill(job.alive(1)["pid"], signal.SIGKILL)
    assert job.finish().code != 0
    harness.check_nothing_left()
    result = harness.checked(by_mpirun(harness, 2, *harness.app.small, run_dir=run_dir).finish(), 2)
    assert result["resumed_from_step"] >= 5
    assert result["weights_sha256"] == undisturbed(2, "--transport=mpi")["weights_sha256"]


def test_stopping_the_script_stops_mpirun_and_its_ranks(harness: Harness) -> None:
    job = harness.start(2, "--dataset=mnist-5k", "--epochs=1000", "--log-every=1", "--transport=mpi")
    job.wait_for_step(3)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish().code == 128 + signal.SIGTERM
    assert not harness.left_running()
    assert (job.run_dir / "checkpoints" / f"step-{last_step(job.run_dir):08d}").is_dir()


def test_ranks_end_when_mpirun_is_killed(harness: Harness) -> None:
    job = by_mpirun(harness, 2, "--dataset=mnist-5k", "--epochs=1000", "--log-every=1", run_dir=harness.folder / "run")
    job.wait_for_step(3)
    assert '"backend": "mpi"' in (job.run_dir / "metrics.jsonl").read_text()  # because mpirun started the ranks
    job.process.kill()
    job.process.communicate()
    harness.check_nothing_left()


def test_the_installation_is_verified_again_and_again(harness: Harness, soak: bool) -> None:
    for i in range(amount(soak, few=1, many=10)):
        outcome = bare(harness, ["bash", VERIFY, str(2 + i % 2), "--transport=mpi"])
        assert outcome.code == 0, outcome
        rows = outcome.stdout.splitlines()
        assert len(rows) >= 12
        assert all(row.startswith("ok ") for row in rows)
        assert "mpi on cpu" in outcome.stdout


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [
        ("mpirun", "--transport=gloo", "started by horovodrun --gloo"),
        ("horovodrun", "--transport=mpi", "started by horovodrun --mpi, or the mpirun of its own MPI"),
    ],
)
def test_ranks_that_the_transport_cannot_join_are_refused(
    harness: Harness, command: str, option: str, words: str
) -> None:
    start: Sequence[str] = mpirun() if command == "mpirun" else HOROVODRUN
    outcome = bare(harness, [*start, "-np", "2", sys.executable, TRAIN, option, *SMALL])
    assert outcome.code != 0
    (line,) = {line.partition("error: ")[2] for line in outcome.stderr.splitlines() if "error: " in line}
    assert "started 2 ranks, but Horovod found 1" in line
    assert words in line
