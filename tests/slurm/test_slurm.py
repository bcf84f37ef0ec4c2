"""Test the sbatch scripts on a real Slurm: two nodes, preemption, the time limit, scancel. A stop loses no step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
from cluster import Cluster
from harness import ROOT, Harness, Outcome, app_spec, faulty, last_step, losses

SCRIPTS = ROOT / "deploy" / "slurm"
LONGER = ["--epochs=12"]  # 192 steps, enough for a stop before the end
ENDED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
]
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"


class Site:
    """A cluster, and a user's folder with the repository. Jobs are submitted in this folder."""

    def __init__(self, running: Cluster, harness: Harness) -> None:
        self.cluster = running
        self.harness = harness
        self.folder = harness.folder / "site"
        self.folder.mkdir()
        for name in ("apps", "core", "deploy", "scripts"):
            (self.folder / name).symlink_to(ROOT / name)
        self.environ = harness.environ(
            PATH=running.environ["PATH"],
            SLURM_CONF=running.environ["SLURM_CONF"],
            GLOO_SOCKET_IFNAME="lo",
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        )

    def submit(self, *words: str, cwd: Path | None = None) -> str:
        """Submit a job of one rank per node. Return its number. The output is in <number>.out and <number>.err."""
        command = ["sbatch", "--parsable", "--ntasks-per-node=1", "--output=%j.out", "--error=%j.err", *words]
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def train(self, app: str, *options: str, sbatch: tuple[str, ...] = ()) -> str:
        return self.submit(*sbatch, f"deploy/slurm/{app}.sbatch", *self.harness.app.small, *options)

    def run_dir(self, app: str, job: str) -> Path:
        return self.folder / "runs" / app / f"slurm-{job}"

    def said(self, job: str) -> tuple[str, str]:
        files = [self.folder / f"{job}.{name}" for name in ("out", "err")]
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return out, err

    def wait_for(self, job: str, condition: Callable[[dict[str, str]], Any], limit: float = 180) -> dict[str, str]:
        """Poll Slurm's fields of a job until ``condition(fields)`` is true, and return the fields."""
        deadline = time.monotonic() + limit
        while not condition(reported := self.cluster.job(job)):
            assert reported["JobState"] not in ENDED, (reported, self.said(job))
            assert time.monotonic() < deadline, (reported, self.said(job))
            time.sleep(0.2)
        return reported

    def wait_for_step(self, app: str, job: str, step: int) -> None:
        self.wait_for(job, lambda reported: last_step(self.run_dir(app, job)) >= step)

    def finish(self, job: str, state: str = "COMPLETED", limit: float = 180) -> dict[str, str]:
        reported = self.wait_for(job, lambda reported: reported["JobState"] in ENDED, limit)
        assert reported["JobState"] == state, (reported, self.said(job))
        return reported

    def result(self, job: str) -> dict[str, Any]:
        """Return the result of a job that succeeded, after comparing it with the job's files."""
        out, err = self.said(job)
        return self.harness.checked(Outcome(0, out, err, 0), 2)


@pytest.fixture
def slurm(request: pytest.FixtureRequest, harness: Harness) -> Iterator[Site]:
    """Yield a cluster of two nodes, with the test's parameter as settings. Check at the end that no process is left."""
    settings = getattr(request, "param", USER_SIGNAL)
    with cluster.running({"SAMESTEP_TEST": harness.mark}, settings=settings) as running:
        yield Site(running, harness)
    harness.check_nothing_left()


def check_resumed(site: Site, app: str, job: str, expected: dict[str, Any]) -> None:
    """Check that the job stopped once, resumed at that step, and ended with the weights of an undisturbed job."""
    result = site.result(job)
    (stopped,) = re.findall(r"stopped by SIG\w+ at step (\d+), which is saved", "".join(site.said(job)))
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["resumed_from_step"] == int(stopped) < result["steps"]
    assert len(losses(site.run_dir(app, job))) == result["steps"]  # fails unless each step occurs once
    lines = [json.loads(line) for line in (site.run_dir(app, job) / "metrics.jsonl").read_text().splitlines()]
    assert [line["resumed"]["step"] for line in lines if "resumed" in line] == [int(stopped)]
    assert site.cluster.job(job)["Restarts"] == "1"


def check_two_nodes(slurm: Site, app: str, launcher: str, job: str, expected: dict[str, Any]) -> None:
    """Check that the job ended with the weights of one machine, and that each node started a step of the job."""
    result = slurm.result(job)
    assert result["launcher"] == launcher
    assert result["run_dir"] == str(slurm.run_dir(app, job))
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert len(list((slurm.cluster.folder).glob("127.0.0.*.log"))) == 2
    for log in slurm.cluster.folder.glob("127.0.0.*.log"):
        assert f"launch task StepId={job}.0" in log.read_text()


@pytest.mark.parametrize(
    ("app", "launcher"),
    # The quick tests run mnist_ddp on two nodes in a preempted job.
    [pytest.param("mnist_ddp", "torchrun", marks=pytest.mark.soak), ("mnist_horovod", "openmpi")],
)
def test_two_nodes_end_with_the_weights_of_one_machine(
    slurm: Site, undisturbed: Callable[..., dict[str, Any]], app: str, launcher: str
) -> None:
    """A launch script on each node starts the ranks. For Horovod, one launch script calls mpirun, which uses Slurm."""
    job = slurm.train(app, *LONGER)
    slurm.finish(job)
    check_two_nodes(slurm, app, launcher, job, undisturbed(2, *LONGER))


@pytest.mark.parametrize(
    ("slurm", "app"),
    [
        pytest.param(USER_SIGNAL, "mnist_ddp", id="mnist_ddp, USR1 to the script"),
        pytest.param("", "mnist_ddp", id="mnist_ddp, TERM to the steps", marks=pytest.mark.soak),
        pytest.param(USER_SIGNAL, "mnist_horovod", id="mnist_horovod, USR1 to the script", marks=pytest.mark.soak),
    ],
    indirect=["slurm"],
)
def test_a_preempted_job_resumes(slurm: Site, undisturbed: Callable[..., dict[str, Any]], app: str) -> None:
    expected = undisturbed(2, *LONGER)
    job = slurm.train(app, *LONGER)
    slurm.wait_for_step(app, job, 3)
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--wrap=srun true")
    slurm.finish(urgent)
    assert last_step(slurm.run_dir(app, job)) < expected["steps"]  # the job was preempted
    slurm.finish(job)
    check_resumed(slurm, app, job, expected)
    check_two_nodes(slurm, app, "torchrun" if app == "mnist_ddp" else "openmpi", job, expected)


@pytest.mark.soak  # the quick tests send the same signal by a preemption
def test_a_job_out_of_time_resumes(slurm: Site, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Slurm checks time limits once per minute, so the signal comes 25 to 85 s after the start."""
    expected = undisturbed(2, *LONGER)
    # With slow steps, the job runs for two minutes.
    slurm.environ.update(faulty({"slow": [[0, "input", 0, expected["steps"]]], "seconds": 0.6}))
    job = slurm.train("mnist_ddp", *LONGER, sbatch=("--time=2", "--signal=B:USR1@35"))
    slurm.wait_for(job, lambda reported: reported["Restarts"] == "1")
    slurm.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    slurm.finish(job)
    check_resumed(slurm, "mnist_ddp", job, expected)


def test_scancel_leaves_a_checkpoint_and_no_process(slurm: Site) -> None:
    job = slurm.train("mnist_ddp", "--epochs=1000", "--checkpoint-every=100000")
    slurm.wait_for_step("mnist_ddp", job, 3)
    slurm.cluster.run("scancel", job)
    slurm.finish(job, "CANCELLED")
    run_dir = slurm.run_dir("mnist_ddp", job)
    assert (run_dir / "checkpoints" / f"step-{last_step(run_dir):08d}").is_dir()
    jobs = [pid for pid, command in slurm.harness.left_running().items() if "python" in command or "srun" in command]
    assert not jobs
    assert slurm.cluster.job(job)["Restarts"] == "0"


def test_srun_starts_one_rank_for_each_task(slurm: Site, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Run the script of docs/slurm.md, and stop its job by scancel."""
    (script,) = re.findall(r"```bash\n(#!.*?)```", (ROOT / "docs" / "slurm.md").read_text(), re.DOTALL)
    (slurm.folder / "one.sbatch").write_text(script)
    job = slurm.submit("one.sbatch", *slurm.harness.app.small, *LONGER)
    slurm.wait_for_step("mnist_ddp", job, 3)
    slurm.cluster.run("scancel", "--signal=USR1", "--batch", job)
    slurm.finish(job)
    check_resumed(slurm, "mnist_ddp", job, undisturbed(2, *LONGER))
    assert slurm.result(job)["launcher"] == "slurm"


# In its first start, the job that has the array's own number ends as a job that USR1 has stopped.
ARRAY = """#!/bin/bash
#SBATCH --nodes=1 --array=0-1 --requeue --open-mode=append
. "$SLURM_SUBMIT_DIR/deploy/slurm/common.sh"
export TASK=$SLURM_ARRAY_TASK_ID CODE=0
if [ "$SLURM_JOB_ID" = "$SLURM_ARRAY_JOB_ID" ] && [ -z "$SLURM_RESTART_COUNT" ]; then
  sleep 3
  CODE=138
fi
save_and_requeue srun bash -c 'echo "task $TASK"; exit "$CODE"'
"""


def test_a_stopped_job_of_an_array_is_queued_again_without_the_others(slurm: Site) -> None:
    """The job's srun gets the variables that the script exports, although sbatch exports only PATH and SLURM_CONF."""
    (slurm.folder / "array.sbatch").write_text(ARRAY)
    slurm.submit("--export=PATH,SLURM_CONF", "--output=array.out", "--error=array.err", "array.sbatch")
    deadline = time.monotonic() + 120
    while slurm.cluster.run("squeue", "--noheader"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert sorted((slurm.folder / "array.out").read_text().splitlines()) == ["task 0", "task 1", "task 1"]


def test_mistakes_are_reported_and_not_tried_again(slurm: Site) -> None:
    elsewhere = slurm.harness.folder / "elsewhere"
    elsewhere.mkdir()
    job = slurm.submit(str(SCRIPTS / "mnist_ddp.sbatch"), cwd=elsewhere)
    assert slurm.finish(job, "FAILED")["ExitCode"] == "2:0"
    reported = (elsewhere / f"{job}.err").read_text()
    assert reported == f"error: {elsewhere} is not the project's folder: call sbatch there\n"

    job = slurm.train("mnist_ddp", "--lr=-1")
    assert slurm.finish(job, "FAILED")["ExitCode"] == "2:0"
    assert "error: --lr" in slurm.said(job)[1]
    assert slurm.cluster.job(job)["Restarts"] == "0"


def test_every_app_has_a_script_that_sbatch_takes(slurm: Site) -> None:
    for app in (path.name for path in (ROOT / "apps").iterdir() if (path / "options.py").exists()):
        assert (SCRIPTS / f"{app}.sbatch").exists()
        slurm.cluster.run("sbatch", "--test-only", str(SCRIPTS / f"{app}.sbatch"))


def test_horovod_knows_a_slurm_job_only_in_one(harness: Harness) -> None:
    horovod = Harness(app_spec("mnist_horovod"), "cpu", harness.folder)
    for transport, job, words in (("mpi", "", "this is no Slurm job"), ("gloo", "1", "add --transport mpi")):
        outcome = horovod.run(2, "--dry-run", f"--transport={transport}", HOROVOD_HOSTS="slurm", SLURM_JOB_ID=job)
        assert (outcome.code, len(outcome.errors)) == (2, 1)
        assert words in outcome.errors[0]
    shown = horovod.run(2, "--dry-run", "--transport=mpi", HOROVOD_HOSTS="slurm", SLURM_JOB_ID="1").stdout
    assert "mpirun -np 2 " + sys.executable in shown
