"""Test that the scripts of deploy/slurm pass the job's secret to all nodes without showing it to other users."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
STARTED_BY_SRUN = sorted(
    path for path in (REPOSITORY / "deploy" / "slurm").glob("*.sbatch") if "on_every_node" in path.read_text()
)
COMMANDS = {  # fakes of Slurm's commands; all users can see a command's arguments, but not its environment
    "scontrol": "printf 'node1\\nnode2\\n'",
    "srun": 'echo "$*"; echo "$SAMESTEP_SECRET"; export -p | grep -c "x SAMESTEP_SECRET="',
}


@pytest.mark.parametrize("script", STARTED_BY_SRUN, ids=lambda path: path.stem)
def test_srun_gets_a_new_secret_in_its_environment_alone(script: Path, tmp_path: Path) -> None:
    for name, program in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o700)
    job = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "node[1-2]", "NTASKS_PER_NODE": "2"}
    environ = {f"SLURM_{name}": value for name, value in {**job, "SUBMIT_DIR": str(REPOSITORY)}.items()}
    environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    secrets = set()
    for _ in range(2):
        command = ["bash", str(script), "--epochs=1"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done
        words, secret, exported = done.stdout.splitlines()
        assert (len(secret), exported, secret in words) == (64, "1", False)
        secrets.add(secret)
    assert len(secrets) == 2
