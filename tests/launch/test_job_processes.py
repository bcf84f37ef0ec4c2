"""Test that the processes of a job are found by SAMESTEP_JOB_INFO in their environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from processes import wait_for
from samestep.job_info import JobInfo, this_launcher
from samestep_launch.fork_server import IDLE
from samestep_launch.job_processes import JobProcesses

LIMIT = 10.0


@contextmanager
def sleeping(info: JobInfo) -> Iterator[int]:
    """Run a process with the variables of ``info``; yield its process ID as soon as /proc shows the variables."""
    environ = {**os.environ, **info.to_environ()}
    with subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True) as process:
        try:
            wait_for(lambda: shows(process.pid, info), LIMIT)
            yield process.pid
        finally:
            process.kill()


def shows(pid: int, info: JobInfo) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return info.to_environ()["SAMESTEP_JOB_INFO"].encode() in file.read()


def test_a_process_of_the_job_is_found_whatever_else_its_document_has() -> None:
    """The job info of a process may have further fields. Processes of other jobs and launch scripts are left out."""
    mine = JobInfo(job="mine", launcher=this_launcher())
    with ExitStack() as stack:
        same = stack.enter_context(sleeping(mine))
        member = stack.enter_context(sleeping(JobInfo(job="mine", launcher=this_launcher(), errors=3, rank=1)))
        for other in (
            JobInfo(job="mine, too", launcher=this_launcher()),
            JobInfo(job="mine", launcher="1@elsewhere"),
            JobInfo(job=IDLE, launcher=this_launcher(), name="mine"),
        ):
            stack.enter_context(sleeping(other))
        processes = JobProcesses("mine")  # existing children belong to the job only by their job info
        assert processes.find() == sorted([same, member])
