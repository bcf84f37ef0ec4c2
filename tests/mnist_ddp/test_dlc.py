"""Run the job of deploy/dlc in two processes that simulate its two pods, each with DLC's variables."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness
from processes import free_port


@pytest.mark.soak  # the quick tests check the job file (tests/deploy) and two hosts (tests/multihost)
def test_two_pods_of_dlc_are_one_job(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """RANK and WORLD_SIZE count pods. Both pods use one run dir, as on NAS, and end with the weights of one machine."""
    expected = undisturbed(2)
    job_file = dict(
        line.split("=", 1) for line in (ROOT / "deploy" / "dlc" / "mnist_ddp.params").read_text().splitlines()
    )
    command = job_file["command"].replace("/samestep", str(ROOT)).replace("/mnt", str(harness.folder))
    envs = dict(pair.split("=") for pair in job_file["envs"].replace("/mnt", str(harness.folder)).split(","))
    secret = Path(envs["SAMESTEP_SECRET_FILE"])
    secret.parent.mkdir(exist_ok=True)
    secret.touch(mode=0o600)
    secret.write_text("of both pods")
    pods = int(job_file["workers"])
    run_dir = harness.folder / "runs" / "mnist_ddp"
    port = free_port()
    jobs = [
        harness.start_command(
            [*shlex.split(command), f"--device={harness.device}", *harness.app.small],
            run_dir,
            RANK=str(rank),
            WORLD_SIZE=str(pods),
            NPROC_PER_NODE=job_file["worker_gpu"],
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            SAMESTEP_SECRET_FILE=str(secret),
        )
        for rank in range(pods)
    ]
    first, second = (job.finish() for job in jobs)
    result = harness.checked(first, 2)
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert (result["node_count"], result["restarts"]) == (2, 0)
    assert (second.code, second.stdout) == (0, "")  # only one machine prints the result
    assert {path.name for path in (run_dir / "log").glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}
