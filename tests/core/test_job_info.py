"""Test that ranks read the launch script's values unchanged, and that a damaged document is a ConfigError."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from programs import CORE
from samestep import ConfigError
from samestep.job_info import JobInfo, leave_job


def test_each_field_arrives_through_a_shell() -> None:
    """mpirun and horovodrun pass variables to other hosts through a shell."""
    info = JobInfo(
        job="0" * 32,
        launcher="12@node-1",
        run_dir="runs/a 'b' \"ä\"",
        restarts=2,
        ranks=4,
        machines=2,
        errors=7,
        tmpdir="/tmp/a 'b' \"ä\" $HOME \udcff",
        timeout=0.5,
        grace=30.0,
        control=8,
        room="--",
        forker=9,
        members="127.0.0.1 29500 00ff",
        rank=3,
        name="000003",
    )
    variables = info.to_environ()
    document = variables["SAMESTEP_JOB_INFO"]
    assert document.isascii()
    code = "import os; from samestep.job_info import JobInfo; print(ascii(JobInfo.from_environ(os.environ)))"
    given = ["env", *(f"{name}={value}" for name, value in variables.items())]
    script = f'{shlex.join(given)} PYTHONPATH="$1" "$2" -c "$3"'
    command = ["sh", "-c", script, "sh", CORE, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{info!a}\n"


def test_a_process_without_a_launch_script_has_an_empty_document() -> None:
    assert JobInfo.from_environ({"PATH": "/bin"}) == JobInfo()
    assert JobInfo().to_environ() == {"SAMESTEP_JOB_INFO": "{}", "SAMESTEP_RESTARTS": "0"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAMESTEP_JOB_INFO", "{"),
        ("SAMESTEP_JOB_INFO", "[]"),
        ("SAMESTEP_JOB_INFO", '{"job": 1}'),
        ("SAMESTEP_JOB_INFO", '{"ranks": true}'),
        ("SAMESTEP_JOB_INFO", '{"ranks": "2"}'),
        ("SAMESTEP_JOB_INFO", '{"timeout": NaN}'),
        ("SAMESTEP_JOB_INFO", "[" * 100_000),
        ("SAMESTEP_RESTARTS", "-1"),
        ("SAMESTEP_RESTARTS", "one\n"),
    ],
)
def test_a_damaged_document_is_one_line_with_the_remedy(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}.*unset it") as raised:
        JobInfo.from_environ({name: value})
    assert "\n" not in str(raised.value)


def test_a_document_of_a_newer_version_is_read() -> None:
    assert JobInfo.from_environ({"SAMESTEP_JOB_INFO": '{"job": "a", "color": "red"}'}).job == "a"


def test_a_job_in_a_job_starts_without_its_variables() -> None:
    environ = {"PATH": "/bin", **JobInfo(job="a", run_dir="runs/a").to_environ()}
    leave_job(environ)
    assert environ == {"PATH": "/bin"}
