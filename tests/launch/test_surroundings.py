"""Test how a launch script handles its machine: CPU quotas, interfaces, packages, and variables of other jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import REPOSITORY
from samestep import ConfigError, env
from samestep.job_info import JobInfo
from samestep_launch import imports, machine, supervise
from samestep_launch.environments import source_path
from samestep_launch.job import read_nodes, warn_of_other_ranks

LIMIT = 60  # seconds for a child process


# --- processors --------------------------------------------------------------------------------------------------

V2 = "0::{}\n"
V1 = "12:memory:/m\n4:cpu,cpuacct:{}\n1:name=systemd:/s\n"
CPU = "cpu,cpuacct"
QUOTA = "cpu.cfs_quota_us"
PERIOD = "cpu.cfs_period_us"
QUOTAS: dict[str, tuple[str, dict[str, str], int]] = {
    "none": (V2.format("/"), {}, 64),
    "no cgroups": ("", {"cpu.max": "200000 100000"}, 64),
    "no limit": (V2.format("/a"), {"a/cpu.max": "max 100000\n", "cpu.max": "max"}, 64),
    "a container's own": (V2.format("/"), {"cpu.max": "200000 100000\n"}, 2),
    "part of a processor": (V2.format("/"), {"cpu.max": "1000 100000\n"}, 1),
    "rounded up": (V2.format("/a"), {"a/cpu.max": "250000 100000\n"}, 3),
    "of a group above": (V2.format("/a/b/c"), {"a/cpu.max": "300000 100000", "a/b/c/cpu.max": "max 100000"}, 3),
    "the smallest": (V2.format("/a/b"), {"a/cpu.max": "300000 100000", "a/b/cpu.max": "900000 100000"}, 3),
    "outside of the mount": (V2.format("/docker/1f"), {"cpu.max": "400000 100000"}, 4),
    "more than the affinity": (V2.format("/"), {"cpu.max": "9900000 100000"}, 64),
    "version 1": (V1.format("/a"), {f"{CPU}/a/{QUOTA}": "50000\n", f"{CPU}/a/{PERIOD}": "25000\n"}, 2),
    "version 1, no limit": (V1.format("/"), {f"{CPU}/{QUOTA}": "-1", f"{CPU}/{PERIOD}": "9"}, 64),
    "version 1, no period": (V1.format("/"), {f"{CPU}/{QUOTA}": "50000"}, 64),
    "a name with colons": (V2.format("/a:b"), {"a:b/cpu.max": "200000 100000"}, 2),
    "damaged": ("x\n::\n0::/\n", {"cpu.max": "lots of it"}, 64),
    "empty": (V2.format("/"), {"cpu.max": ""}, 64),
    "a period of zero": (V2.format("/"), {"cpu.max": "5 0"}, 64),
    "5,000 digits": (V2.format("/"), {"cpu.max": "9" * 5000 + " 100000"}, 64),
    "4,000 digits": (V2.format("/"), {"cpu.max": "9" * 4000 + " 100000"}, 64),
}  # fmt: skip


@pytest.mark.parametrize("what", QUOTAS)
def test_the_processors_are_those_of_the_affinity_and_of_the_quota(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, quotas, expected = QUOTAS[what]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for name, content in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": quotas[name] for name in quotas},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert machine.processors(tmp_path) == expected


def test_a_quota_that_cannot_be_read_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "proc" / "self" / "cgroup").mkdir(parents=True)
    assert machine.processors(tmp_path) == 64


# --- interfaces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "lo", "lo,lo"])
def test_an_interface_of_this_machine_is_taken(value: str) -> None:
    machine.check_interface({"GLOO_SOCKET_IFNAME": value})


@pytest.mark.parametrize("value", ["nosuch0", "^lo", "=lo", "lo,nosuch0", "lo,", "lo:0", "l", "lo\n"])
def test_another_interface_is_refused_with_its_variable(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        machine.check_interface({"GLOO_SOCKET_IFNAME": value, "NCCL_SOCKET_IFNAME": "^lo"})
    assert str(caught.value).startswith(f"GLOO_SOCKET_IFNAME={value}: this machine has no interface ")
    assert "unset GLOO_SOCKET_IFNAME" in str(caught.value)


def test_an_empty_interface_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert supervise.environment(JobInfo(job="job"), 1)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


# --- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(path.name for path in (REPOSITORY / "scripts").glob("run_*.sh")))
def test_a_symbolic_link_starts_the_script(script: str, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(REPOSITORY / "scripts" / script, scripts)
    (scripts / "launch.sh").write_text("echo started $1\n")
    (tmp_path / "absolute").symlink_to(scripts / script)
    (tmp_path / "link").symlink_to("absolute")
    command = ["bash", "link", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    app = script.removeprefix("run_").removesuffix(".sh")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"started {app}\n", "")


# --- variables of other jobs ---------------------------------------------------------------------------------------


def test_the_ranks_get_no_place_from_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.launcher_variables():
        monkeypatch.setenv(name, "1")
    for name in ("MASTER_ADDR", "RANK_TABLE_FILE", "SLURM_JOB_ID", "SLURM_NTASKS", "MS_TOPO_TIMEOUT", "LORA_RANK"):
        monkeypatch.setenv(name, "kept")
    environ = supervise.environment(JobInfo(job="job"), 1)
    assert not env.launcher_variables() & environ.keys()
    kept = {name for name, value in environ.items() if value == "kept"}
    assert kept == {"MASTER_ADDR", "RANK_TABLE_FILE", "SLURM_JOB_ID", "SLURM_NTASKS", "MS_TOPO_TIMEOUT", "LORA_RANK"}


OTHER_RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {
    **OTHER_RANK,
    "TORCHELASTIC_RUN_ID": "x",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


@pytest.mark.parametrize("environ", [OTHER_RANK, TORCHRUN], ids=["by hand", "torchrun"])
def test_ranks_of_another_job_are_not_taken_for_machines(
    environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal that a rank opened has the rank's variables, for example. The port of the rank's job may be in use."""
    nodes = read_nodes(environ)
    assert (nodes.count, nodes.rank, nodes.master_port) == (1, 0, None)
    here = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "b", "MASTER_PORT": "29500"}
    assert read_nodes({**environ, **here}).place == ("b", 29500)
    warn_of_other_ranks(environ, nodes)
    line = capfd.readouterr().err
    assert re.fullmatch(
        r"warning: \w+'s variables make this process number 3 of 4: .* set NNODES and NODE_RANK\n", line
    )


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"HOROVOD_RANK": "x"}])
def test_nothing_is_printed_about_a_single_process(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    warn_of_other_ranks(environ, read_nodes(environ))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("environ", "begin", "end"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 counts machines, but NODE_RANK is not set: ", "unset WORLD_SIZE"),
        ({"PET_NNODES": "4"}, "PET_NNODES=4 counts machines, but NODE_RANK is not set: ", "unset PET_NNODES"),
        ({"NNODES": "2", "RANK": "0"}, "NNODES=2 counts machines, but MASTER_ADDR is not set: ", "unset NNODES"),
        ({"NNODES": "2", "RANK": "0", "MASTER_ADDR": "a"}, "NNODES=2 counts machines, but MASTER_PORT", "unset NNODES"),
        ({"WORLD_SIZE": "2", "NODE_RANK": "2"}, "NODE_RANK=2 is not below WORLD_SIZE=2: ", "from 0"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 is set but NNODES is not: ", "unset NODE_RANK"),
    ],
)
def test_an_error_about_machines_begins_with_the_variable_and_ends_with_the_remedy(
    environ: dict[str, str], begin: str, end: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_nodes(environ)
    assert str(caught.value).startswith(begin)
    assert end in str(caught.value)


# --- packages ----------------------------------------------------------------------------------------------------


def package(folder: Path, name: str, content: str) -> Path:
    (folder / name).mkdir(parents=True)
    path = folder / name / "__init__.py"
    path.write_text(content)
    return path


def checked(*names: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `check_imports` in a new process, which prints the error to stderr."""
    program = "import sys\nfrom samestep import ConfigError\nfrom samestep_launch.imports import check_imports\n"
    program += "try:\n    check_imports(sys.argv[1:])\nexcept ConfigError as error:\n    sys.exit(str(error))\n"
    command = [sys.executable, "-c", program, *names]
    environ = {**os.environ, **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("raise ImportError('built for\\nPython 3.9')", "ImportError: built for"),
        ("raise ImportError", "ImportError"),
        ("a b", "SyntaxError: invalid syntax (__init__.py, line 1)"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_foreign_package_on_pythonpath_is_named_with_its_folder(content: str, reason: str, tmp_path: Path) -> None:
    path = package(tmp_path, "numpy", content)
    done = checked(*imports.NEEDED, PYTHONPATH=os.pathsep.join([str(tmp_path), *source_path(REPOSITORY)]))
    assert done.stderr == f"{path} cannot be imported ({reason}): take {tmp_path} off PYTHONPATH\n"


def test_a_damaged_or_missing_package_is_named_with_the_interpreter(tmp_path: Path) -> None:
    path = package(tmp_path, "broken", "1 / 0")
    program_path = os.pathsep.join(source_path(REPOSITORY))
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(tmp_path)!r})\n")
    done = checked("missing", PYTHONPATH=program_path)
    assert done.stderr == f"{sys.executable} lacks missing: install it there\n"
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    done = checked("broken", PYTHONPATH=f"{program_path}{os.pathsep}{link}")
    assert done.stderr.endswith(f"take {link} off PYTHONPATH\n")
    assert str(path.parent.name) in done.stderr


def launched(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program that prints its variable HOME, by ``samestep run``."""
    (folder / "program.py").write_text("import os\nprint('HOME', os.environ.get('HOME'))\n")
    command = [sys.executable, "-m", "samestep", "run", "--run-dir=run", "--max-restarts=0", "program.py"]
    path = os.pathsep.join(filter(None, [environ.pop("PYTHONPATH", ""), *source_path(REPOSITORY)]))
    inherited = {name: value for name, value in os.environ.items() if name != "HOME"}
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    return subprocess.run(command, cwd=folder, env={**inherited, "PYTHONPATH": path, **environ}, **settings)


def test_a_program_starts_without_home_and_without_asserts(tmp_path: Path) -> None:
    done = launched(tmp_path, PYTHONOPTIMIZE="1", PYTHONWARNINGS="error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "HOME None\n", "")


def test_a_foreign_package_ends_the_command_in_one_line(tmp_path: Path) -> None:
    package(tmp_path / "other", "numpy", "raise ImportError('for another Python')")
    done = launched(tmp_path, PYTHONPATH=str(tmp_path / "other"))
    assert done.returncode == 2
    assert re.fullmatch(r"error: \S+ cannot be imported \(.*\): take \S+ off PYTHONPATH\n", done.stderr), done.stderr
