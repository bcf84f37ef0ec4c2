"""Test that job files of deploy/dlc have only parameters of dlc, and commands that launch scripts accept."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
DLC = REPOSITORY / "deploy" / "dlc"
# Parameters of `dlc submit pytorchjob`, by Alibaba Cloud's documentation: help.aliyun.com/en/pai/developer-reference/
# commands-used-to-submit-jobs (table 1, 2024-11-19) and the job file of submit-jobs-by-using-the-sdk-for-python.
PARAMETERS = set(
    "name command data_sources code_source code_branch code_commit thirdparty_libs vpc_id switch_id security_group_id "
    "interactive job_max_running_time_minutes envs tags workspace_id resource_id workers worker_image worker_cpu "
    "worker_gpu worker_memory worker_shared_memory".split()
)
ON_THE_COMMAND_LINE_ALONE = {"job_file", "thirdparty_lib_dir"}


def job_file(path: Path) -> dict[str, str]:
    pairs = [line.split("=", 1) for line in path.read_text().splitlines()]
    found = dict(pairs)
    assert len(found) == len(pairs), f"{path} has a parameter twice"
    return found


def test_job_files_have_known_parameters_and_commands_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text("of all nodes")
    paths = sorted(DLC.glob("*.params"))
    assert paths
    port = free_port()
    for path in paths:
        job = job_file(path)
        assert job.keys() <= PARAMETERS, path
        assert {"name", "workspace_id", "workers", "worker_image", "command"} <= job.keys()
        for rank in range(int(job["workers"])):  # DLC starts each pod with these variables
            sets = {"RANK": str(rank), "WORLD_SIZE": job["workers"], "NPROC_PER_NODE": job["worker_gpu"]}
            sets |= {"MASTER_ADDR": "dlc-master-0", "MASTER_PORT": port}
            sets |= dict(pair.split("=") for pair in job["envs"].replace("/mnt/runs", str(tmp_path)).split(","))
            assert "SAMESTEP_SECRET_FILE" in sets
            done = subprocess.run(
                [*shlex.split(job["command"].replace("/samestep", str(REPOSITORY))), "--dry-run"],
                env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, **sets},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            nodes = f"--nnodes={job['workers']} --node-rank={rank} --nproc-per-node={job['worker_gpu']}"
            assert nodes in done.stdout
            assert "--master-addr=dlc-master-0" in done.stdout


def test_the_commands_of_the_page_have_known_parameters() -> None:
    text = re.sub(r"\\\n\s*", " ", (DLC / "README.md").read_text())
    commands = re.findall(r"^dlc submit pytorchjob (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        # Options within quotes belong to the program, not to dlc.
        names = {word[2:].partition("=")[0] for word in shlex.split(command) if word.startswith("--")}
        assert names <= PARAMETERS | ON_THE_COMMAND_LINE_ALONE, command


def test_each_placeholder_has_a_row_that_says_where_it_comes_from() -> None:
    """Compare the placeholders in commands and job files with the table of deploy/dlc/README.md."""
    page = (DLC / "README.md").read_text()
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    texts = [blocks, *(path.read_text() for path in DLC.glob("*.params"))]
    words = set(re.findall(r"\b[A-Z]{2,}(?:_ID)?\b(?!=)", "".join(texts)))
    table = re.search(r"^\| word \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table
    rows = re.findall(r"^\| `([A-Z_]+)` \| [^|]+ \| [^|]+ \|$", table[1], re.MULTILINE)
    assert {"WORKSPACE_ID", "DATA_ID", "CODE_ID", "IMAGE"} <= words
    assert sorted(words) == sorted(rows)
