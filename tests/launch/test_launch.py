"""Test the launch script: it reports mistakes at once, restarts, forwards signals, and leaves no process behind.

bash starts a toy app in a scratch project, as a user does. The app's launcher and ranks are small programs of the
standard library, which run as processes.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import is_running
from repository import REPOSITORY
from samestep import ConfigError
from samestep.failures import Failure
from samestep.hooks import AppHooks
from samestep.job_info import JobInfo
from samestep.options import Options
from samestep_launch import app
from samestep_launch.environments import Environment
from samestep_launch.job import Decision, Job, Nodes, Outcome, decide, read_nodes
from scratch_project import CORE, LIMIT, RANKS, SLEEPER, STUBBORN, ScratchProject, end_of, environment, gone, wait_for

# --- which machine of how many? ----------------------------------------------------------------------------------

HERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, Nodes(1, 0, None, None)),
        ({"NNODES": "", "RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": ""}, Nodes(1, 0, None, None)),
        ({"NNODES": "1", "NODE_RANK": "0"}, Nodes(1, 0, None, None)),
        ({"RANK": ""}, Nodes(1, 0, None, None)),
        ({"MASTER_PORT": "29400"}, Nodes(1, 0, None, 29400)),
        ({"NNODES": "2", "NODE_RANK": "0", **HERE}, Nodes(2, 0, "10.0.0.1", 29400)),
        ({"NNODES": "2", "NODE_RANK": "1", **HERE}, Nodes(2, 1, "10.0.0.1", 29400)),
        (
            {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"},
            Nodes(4, 3, "a", 1),
        ),
        (
            {"NNODES": "2", "PET_NNODES": "4", "NODE_RANK": "1", "PET_NODE_RANK": "3", **HERE},
            Nodes(2, 1, "10.0.0.1", 29400),
        ),
        ({"WORLD_SIZE": "2", "RANK": "1", **HERE}, Nodes(2, 1, "10.0.0.1", 29400)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, Nodes(1, 0, None, None)),
        ({"NNODES": "3", "JOB_COMPLETION_INDEX": "2", **HERE}, Nodes(3, 2, "10.0.0.1", 29400)),
        ({"NNODES": "2", "NODE_RANK": "1", "RANK": "7", "WORLD_SIZE": "8", **HERE}, Nodes(2, 1, "10.0.0.1", 29400)),
    ],
)
def test_the_machines_are_read_from_the_environment(environ: dict[str, str], nodes: Nodes) -> None:
    assert read_nodes(environ) == nodes


@pytest.mark.parametrize(
    ("environ", "expected_output"),
    [
        *(({"NNODES": text}, f"NNODES={text}") for text in ("0", "-1", "x", "1.5", "1:4", " 2", "9" * 30)),
        *(({"PET_NNODES": text}, f"PET_NNODES={text}") for text in ("0", "1:4")),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"RANK": "1"}, "RANK=1"),
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", **HERE}, "NODE_RANK=2"),
        ({"NNODES": "2", "NODE_RANK": "-1", **HERE}, "NODE_RANK=-1"),
        ({"NNODES": "2", "PET_NODE_RANK": "x", **HERE}, "PET_NODE_RANK=x"),
        ({"WORLD_SIZE": "2", "RANK": "2", **HERE}, "RANK=2"),
        ({"NNODES": "2", "JOB_COMPLETION_INDEX": "5", **HERE}, "JOB_COMPLETION_INDEX=5"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        *(({"MASTER_PORT": text}, f"MASTER_PORT={text}") for text in ("0", "65536", "-1", "x", "1e3")),
        ({"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT=70000"),
    ],
)
def test_a_bad_environment_is_one_line_with_the_name_and_the_value(
    environ: dict[str, str], expected_output: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_nodes(environ)
    assert expected_output in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_port_in_use_is_refused_on_the_machine_that_would_listen() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for environ in ({"MASTER_PORT": port}, {**HERE, "NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": port}):
            with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is in use"):
                read_nodes(environ)
        assert read_nodes({**HERE, "NNODES": "2", "NODE_RANK": "1", "MASTER_PORT": port}).master_port == int(port)


def with_commands(*commands: str) -> app.App:
    """Return an app that has these commands."""
    module = SimpleNamespace(HOOKS=AppHooks(commands=dict.fromkeys(commands, "a command")))
    return app.App(Path("/project"), "toy", module, Environment(Path("/project"), "toy"))


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["4"], {}, (4, [])),
        (["4", "--epochs", "1"], {}, (4, ["--epochs", "1"])),
        (["4"], {"NPROC_PER_NODE": "8"}, (4, [])),
        (["--epochs", "1"], {"NPROC_PER_NODE": "8"}, (8, ["--epochs", "1"])),
        ([], {"PET_NPROC_PER_NODE": "2"}, (2, [])),
        (["all", "--quick"], {"NPROC_PER_NODE": "2"}, (2, ["all", "--quick"])),
    ],
)
def test_the_number_of_ranks(
    arguments: list[str], environ: dict[str, str], expected: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert app._ranks_per_node(with_commands("all"), arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "environ", "expected_output"),
    [
        ([], {}, "N, the number of ranks, is missing"),
        (["--epochs", "1"], {}, "N, the number of ranks, is missing"),
        *(([text], {}, f"N={text} ") for text in ("0", "-1", "x", "2.5", "4x", "", "1_0")),
        ([], {"NPROC_PER_NODE": "auto"}, "NPROC_PER_NODE=auto "),
        ([], {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0 "),
    ],
)
def test_a_bad_number_of_ranks_is_named(
    arguments: list[str], environ: dict[str, str], expected_output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        app._ranks_per_node(with_commands(), arguments)
    assert expected_output in str(caught.value)


def test_a_command_is_its_template_with_the_blanks_filled() -> None:
    names = "python nproc nnodes node_rank master_addr master_port log_dir host gpus sort"
    template = [*(f"--{name}={{{name}}}" for name in names.split()), "{train}", "{options}"]
    options = ["--data-dir={python}", "a b", "{}", "--epochs=1"]
    given = Options(gpus=None, sort="x")
    nodes = Nodes(2, 1, "10.0.0.1", 5)
    logs = Path("r/log")
    train = Path("/apps/toy/train.py")
    command = Job("toy", train, template, 4, nodes, given, options[:2]).command("/py", 29400, logs, *options[2:])
    assert command == [
        "--python=/py",
        "--nproc=4",
        "--nnodes=2",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=29400",
        "--log_dir=r/log",
        "--sort=x",  # no --host for two machines, and no --gpus for None
        str(train),
        *options,  # options stay unchanged
    ]
    one = Nodes(1, 0, None, None)
    words = ["{master_addr}", "--host={host}"]
    assert Job("toy", train, words, 1, one, given, []).command("/py", 1, logs) == ["127.0.0.1", "--host=127.0.0.1"]


# --- the script of a real app ------------------------------------------------------------------------------------


def call(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *words],
        cwd=cwd,
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


RUN_MNIST = str(REPOSITORY / "scripts" / "run_mnist_ddp.sh")


def test_a_dry_run_from_anywhere_prints_the_command_and_does_nothing(tmp_path: Path) -> None:
    done = call(RUN_MNIST, "4", "--epochs", "2", "--dry-run", "--data-dir=a b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    command = shlex.split(done.stdout)
    assert command[0] == str(REPOSITORY / ".venvs" / "mnist_ddp" / "bin" / "python")
    assert {"--nproc-per-node=4", "--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1"} <= set(command)
    train = command.index(str(REPOSITORY / "apps" / "mnist_ddp" / "train.py"))
    assert command[train + 1 :] == ["--epochs", "2", "--data-dir=a b"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_several_machines_and_the_given_python(tmp_path: Path) -> None:
    environ = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4321",
        "PYTHON": "/my/python",
    }
    command = shlex.split(call(RUN_MNIST, "8", "--dry-run", cwd=tmp_path, **environ).stdout)
    assert command[0] == "/my/python"
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=4321"} <= set(command)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["4", "--epochs", "1", "--help"]])
def test_help_teaches(tmp_path: Path, words: list[str]) -> None:
    done = call(RUN_MNIST, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for expected_output in (
        "bash scripts/run_mnist_ddp.sh N [options]",
        "--no-resume",
        "--dry-run",
        "PYTHON",
        "exit codes",
    ):
        assert expected_output in done.stdout


@pytest.mark.parametrize(
    ("words", "environ", "expected_output"),
    [
        ([], {}, "N, the number of ranks, is missing"),
        (["none"], {}, "N=none is not a whole number"),
        (["4", "--epoch", "1"], {}, "did you mean --epochs?"),
        (["4", "--dry-rum"], {}, "did you mean --dry-run?"),
        (["4", "--lr=-1"], {}, "--lr: "),
        (["4", "--data-dir=file"], {}, "--data-dir file is not a directory"),
        (["4", "--run-dir=file"], {}, "--run-dir file is not a directory"),
        (["4", "--init-from=missing"], {}, "--init-from missing"),
        (["4", "--init-from=."], {}, "--init-from ."),
        (["4", "--init-from=file"], {}, "--init-from file is not a safetensors file"),
        (["4", "--init-from=empty"], {}, "--init-from empty is not a safetensors file"),
        (["4"], {"NNODES": "x"}, "NNODES=x"),
        (["4"], {"PYTHON": "/no/such/python"}, "PYTHON=/no/such/python is not an executable"),
        (["4"], {"PYTHON": "no-such-python"}, "PYTHON=no-such-python is not an executable"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, words: list[str], environ: dict[str, str], expected_output: str
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    (tmp_path / "empty").write_bytes(b"")
    done = call(RUN_MNIST, *words, cwd=tmp_path, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert expected_output in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize(
    ("words", "spawns"),
    [
        ([], False),
        (["--launcher=spawn"], True),
        (["--launcher", "spawn"], True),
        (["--launcher=spawn", "--launcher", "launch"], False),
        (["--launcher", "spawn", "--launcher=launch"], False),
        (["--launcher=launch", "--launcher=spawn", "--quiet"], True),
    ],
)
def test_of_several_launchers_the_last_counts(tmp_path: Path, words: list[str], spawns: bool) -> None:
    """The launch script and train.py must choose the same launcher."""
    done = call(str(REPOSITORY / "scripts" / "run_lenet_paddle.sh"), "2", *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("paddle.distributed.launch" not in done.stdout) == spawns
    assert ("--nprocs=2" in done.stdout) == spawns


@pytest.mark.parametrize(("app", "expected_output"), [("mnist_dpp", "did you mean mnist_ddp?"), ("zzz", "apps: ")])
def test_an_unknown_app_is_named_with_a_guess(tmp_path: Path, app: str, expected_output: str) -> None:
    done = call(str(REPOSITORY / "scripts" / "launch.sh"), app, "{python}", "--", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: unknown app {app}: ")
    assert expected_output in done.stderr


def test_a_given_python_without_the_requirements_is_told_before_anything_starts(
    project: ScratchProject, tmp_path: Path
) -> None:
    root = tmp_path / "other"
    shutil.copytree(project.root, root, symlinks=True)
    (root / "apps" / "toy" / "requirements.in").write_text("numpy==0.0.1\nno-such-package-anywhere==1.0\n")
    done = ScratchProject(root, project.work).run("note()")
    assert done.returncode == 2
    assert "warning: numpy " in done.stderr  # numpy's version is untested
    assert f"error: {sys.executable} lacks no-such-package-anywhere: " in done.stderr
    assert project.notes() == []


# --- ports -------------------------------------------------------------------------------------------------------

RESERVE = """
import contextlib, json, sys
from samestep_launch import user_folder
with contextlib.ExitStack() as stack:
    ports = [stack.enter_context(user_folder.reserved_port(None)) for _ in range(400)]
    print(json.dumps(ports), flush=True)
    sys.stdin.read()
"""


def test_jobs_that_reserve_ports_at_the_same_time_get_different_ones(tmp_path: Path) -> None:
    """Two processes reserve 400 ports each; random choices would share some ports.

    A job reserves one port. The processes have different values of TMPDIR, which must not matter.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RESERVE],
            env=environment(PYTHONPATH=str(CORE), TMPDIR=str(tmp_path / name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        ports: list[set[int]] = []
        for process in processes:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LIMIT)[0], "no port is to be had"
            ports.append(set(json.loads(process.stdout.readline())))
        assert not ports[0] & ports[1]
        assert all(1 <= port <= 65535 for port in ports[0] | ports[1])
    finally:
        for process in processes:
            process.communicate(timeout=LIMIT)
    assert [process.returncode for process in processes] == [0, 0]
    assert not list(tmp_path.iterdir())


# --- what follows a start ------------------------------------------------------------------------------------------

LOGS = Path("r/log")
SEE = "see r/log/launcher.log and rank-*.log"
FAILED = Outcome(7)
STEPPED = Outcome(7, stepped=True)
RAISED = Outcome(1, stepped=True, failure=Failure(7, "E", "rank 0: E: bad"))


@pytest.mark.parametrize(
    ("outcome", "history", "exit_code", "message"),
    [
        (Outcome(0), [], 0, ""),
        (Outcome(0), [FAILED], 0, ""),
        (Outcome(7, verdict=2), [], 2, ""),
        (Outcome(-15, verdict=143), [], 143, ""),
        (Outcome(-15), [], 143, ""),  # a signal stopped the launcher
        (Outcome(-9), [], None, "warning: the job ended with code -9; starting it again (1 of 3), logs in r/log"),
        (
            Outcome(0, complete=False),
            [],
            None,
            "warning: the job ended with code 0; starting it again (1 of 3), logs in r/log",
        ),
        (FAILED, [FAILED], 1, f"error: the job failed twice before its first step: {SEE}"),
        (FAILED, [STEPPED], None, "warning: the job ended with code 7; starting it again (2 of 3), logs in r/log"),
        (STEPPED, [FAILED], None, "warning: the job ended with code 7; starting it again (2 of 3), logs in r/log"),
        (
            Outcome(7, stepped=None),
            [Outcome(7, stepped=None)],
            None,
            "warning: the job ended with code 7; starting it again (2 of 3), logs in r/log",
        ),
        (RAISED, [RAISED], 1, f"error: the job failed twice with the same error at step 7: rank 0: E: bad: {SEE}"),
        (
            replace(RAISED, crashes="; rank 1 died"),  # the exception may be a consequence of the crash
            [RAISED],
            None,
            "warning: the job ended with code 1; rank 1 died; starting it again (2 of 3), logs in r/log",
        ),
        (
            RAISED,
            [RAISED, STEPPED],
            None,
            "warning: the job ended with code 1; starting it again (3 of 3), logs in r/log",
        ),
        (STEPPED, [STEPPED] * 3, 1, f"error: the job ended with code 7 after 3 restarts: {SEE}"),
        (
            Outcome(7, stepped=True, crashes="; rank 0 died"),
            [STEPPED] * 3,
            1,
            f"error: the job ended with code 7; rank 0 died after 3 restarts: {SEE}",
        ),
    ],
)
def test_what_follows_a_start(outcome: Outcome, history: list[Outcome], exit_code: int | None, message: str) -> None:
    assert decide(outcome, history, 3, LOGS) == Decision(exit_code, message)


def test_without_restarts_the_first_failure_is_the_last() -> None:
    assert decide(FAILED, [], 0, LOGS) == Decision(1, f"error: the job ended with code 7: {SEE}")


# --- an app of samestep 0.2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from samestep.launch import job", "samestep.launch"),
        ("from samestep import env, observe", "samestep.observe"),
        ("import samestep.check.plugin", "samestep.check"),
        ("def f():\n    from samestep.recovery import events", "samestep.recovery.events"),
        ("from samestep.torch.options import (\n    add_local_rank,\n)", "samestep.torch.options"),
    ],
)
def test_an_app_of_samestep_0_2_is_refused_with_the_place_of_the_new_names(
    project: ScratchProject, tmp_path: Path, code: str, name: str
) -> None:
    root = tmp_path / "old"
    shutil.copytree(project.root, root)
    (root / "apps" / "toy" / "train.py").write_text(f"import os\n{code}\n")
    done = ScratchProject(root, project.work).run("note()")
    line = 3 if code.startswith("def") else 2
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {root}/apps/toy/train.py:{line}: samestep 0.3 has no {name}: its new name is in the table under 0.3.0 "
        "in CHANGELOG.md\n"
    )
    table = (REPOSITORY / "CHANGELOG.md").read_text().partition("## 0.2.0")[0]
    assert f"| `{name}" in table


def test_an_app_whose_options_lack_hooks_is_refused_in_one_line(project: ScratchProject, tmp_path: Path) -> None:
    """An app without HOOKS may have the hooks of samestep 0.2, which would never run."""
    root = tmp_path / "old"
    shutil.copytree(project.root, root)
    options = root / "apps" / "toy" / "options.py"
    options.write_text(options.read_text().replace("HOOKS = AppHooks()", "def check_ranks(options, ranks): 1 / 0"))
    done = ScratchProject(root, project.work).run("note()")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {options} has no HOOKS: end it with HOOKS: AppHooks[Options] = AppHooks()\n"


def test_names_that_only_look_old_are_allowed(tmp_path: Path) -> None:
    code = "import launch, samestep\nfrom . import observe\nfrom samestep import env, events\n"
    code += "import samestep_launch.job\nfrom samestep.recovery import watchdog\nfrom samestep.torch import weights\n"
    (tmp_path / "train.py").write_text(code)
    app._check_old_modules(tmp_path)


# --- starts and restarts -----------------------------------------------------------------------------------------


def test_a_job_gets_what_was_resolved_once(project: ScratchProject) -> None:
    code = "note(nproc=nproc, port=port, options=options, environ=dict(os.environ)); print('RESULT {}')"
    done = project.run(code, "3", "--epochs=2", environ={"PET_NODE_RANK": "0"})
    assert (done.returncode, done.stdout) == (0, "RESULT {}\n"), done.stderr
    (note,) = project.notes()
    assert note["nproc"] == "3"
    assert 1024 <= int(note["port"]) <= 65535
    for option in ("--epochs=2", f"--run-dir={project.run_dir}", "--resume", "--dataset=mnist-5k"):
        assert option in note["options"]
    environ = note["environ"]
    info = JobInfo.from_environ(environ)
    assert info.job != ""
    assert (info.restarts, info.ranks, info.machines) == (0, 3, None)
    assert int(environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert not [name for name in environ if name.startswith("PET_")]


SECOND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def test_an_app_may_read_the_machines_from_a_file(project: ScratchProject) -> None:
    """find_machines in options.py imports table.py from the app's folder.

    Without TABLE, the launch script uses NNODES and NODE_RANK.
    """

    def machines(n: str, **environ: str) -> subprocess.CompletedProcess[str]:
        words = ["table", "{nnodes}", "{node_rank}", "{world_size}", "--", n, "--dry-run"]
        return end_of(project.script(*words, environ=environ))

    assert machines("2", TABLE="yes").stdout == "3 1 6\n"  # NNODES, MASTER_ADDR and MASTER_PORT are not set
    assert machines("2").stdout == "1 0 2\n"
    assert machines("2", **SECOND).stdout == "2 1 4\n"
    done = machines("4", TABLE="yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: N=4, but the table lists 2: give N=2\n"


def test_an_app_may_refuse_what_it_would_train_on(project: ScratchProject) -> None:
    """check_start in options.py runs in the second stage, before anything is made or started."""
    program = "import json, os; print(json.loads(os.environ['SAMESTEP_JOB_INFO'])['ranks'])"
    started = end_of(project.script("table", "{python}", "-c", program, "--", "2", "--dataset=mnist-5k", "--epochs=6"))
    assert (started.returncode, started.stdout) == (0, "2\n"), started.stderr
    before = set((project.work / "runs").rglob("*"))
    done = end_of(project.script("table", "{python}", "-c", program, "--", "2", "--dataset=mnist-5k", "--epochs=7"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 7 epochs of mnist-5k from step 0: choose another number\n"
    assert set((project.work / "runs").rglob("*")) == before


def test_threads_that_the_user_set_stay(project: ScratchProject) -> None:
    assert project.run("note(n=os.environ['OMP_NUM_THREADS'])", environ={"OMP_NUM_THREADS": "7"}).returncode == 0
    assert project.notes() == [{"n": "7"}]


def test_the_default_run_dir_is_new_each_time(project: ScratchProject) -> None:
    template = ["{python}", "-c", "pass", "{options}", "--", "1", "--dataset=mnist-5k"]
    both = [project.script("toy", *template) for _ in range(2)]  # at the same time
    assert [end_of(process).returncode for process in both] == [0, 0]
    run_dirs = sorted((project.work / "runs" / "toy").iterdir())
    assert len(run_dirs) == 2
    assert all(re.fullmatch(r"\d{8}T\d{6}Z(-2)?", folder.name) for folder in run_dirs)


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_job_that_keeps_failing_is_started_again_so_many_times(project: ScratchProject, restarts: int) -> None:
    code = "heartbeat(1); note(attempt=attempt, job=job_info['job']); sys.exit(7)"
    done = project.run(code, "2", f"--max-restarts={restarts}")
    assert (done.returncode, done.stdout) == (1, "")
    assert [note["attempt"] for note in project.notes()] == list(range(restarts + 1))
    assert len({note["job"] for note in project.notes()}) == restarts + 1
    *warnings, error = done.stderr.splitlines()
    assert len(warnings) == restarts
    for number, line in enumerate(warnings, start=1):
        assert re.match(rf"warning: .* code 7; starting it again \({number} of {restarts}\)", line)
    assert error.startswith("error: the job ended with code 7")
    assert str(project.run_dir / "log") in error


def test_a_job_that_fails_twice_before_its_first_step_is_not_started_again(project: ScratchProject) -> None:
    code = """
note(attempt=attempt)
heartbeat(0)
heartbeat(5, rank=1, job="another")
(run_dir / "log" / "alive-2").write_text("{")
(run_dir / "log" / "alive-3").write_text("[1]")
sys.exit(7)
"""
    done = project.run(code, "2", "--max-restarts=5")
    assert done.returncode == 1
    assert len(project.notes()) == 2
    warning, error = done.stderr.splitlines()
    assert warning.startswith("warning: the job ended with code 7; starting it again (1 of 5)")
    logs = project.run_dir / "log"
    assert error == f"error: the job failed twice before its first step: see {logs}/launcher.log and rank-*.log"


@pytest.mark.parametrize("stepped", [0, 1])
def test_a_job_of_which_any_rank_has_made_a_step_is_started_again_as_often_as_allowed(
    project: ScratchProject, stepped: int
) -> None:
    code = f"note(attempt=attempt)\nif attempt == {stepped}: heartbeat(0), heartbeat(1, rank=1)\nsys.exit(7)"
    done = project.run(code, "2", "--max-restarts=4")
    assert done.returncode == 1
    assert [note["attempt"] for note in project.notes()] == [0, 1, 2, 3, 4]
    assert done.stderr.splitlines()[-1].startswith("error: the job ended with code 7 after 4 restarts")


@pytest.mark.parametrize("failure", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"])
def test_a_job_that_recovers_succeeds(project: ScratchProject, failure: str) -> None:
    done = project.run(f"note(attempt=attempt)\nif attempt == 0: {failure}\nprint('RESULT {{}}')")
    assert (done.returncode, done.stdout) == (0, "RESULT {}\n")
    assert [note["attempt"] for note in project.notes()] == [0, 1]
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("code", [1, 2])
def test_where_starting_again_cannot_help_the_ranks_verdict_is_the_exit_code(
    project: ScratchProject, code: int
) -> None:
    launcher = f"""
note(attempt=attempt)
(run_dir / "log" / "no-restart").write_text(json.dumps({{"code": {code}}}))
print("error: the disk is full", file=sys.stderr)
sys.exit(9)
"""
    done = project.run(launcher)
    assert (done.returncode, done.stderr) == (code, "error: the disk is full\n")
    assert len(project.notes()) == 1


def test_an_earlier_starts_verdict_does_not_count(project: ScratchProject) -> None:
    (project.run_dir / "log").mkdir(parents=True)
    (project.run_dir / "log" / "no-restart").write_text(json.dumps({"code": 2}))
    assert project.run("note(attempt=attempt)\nif attempt == 0: sys.exit(1)").returncode == 0
    assert len(project.notes()) == 2


def test_the_verdict_of_another_job_does_not_count(project: ScratchProject) -> None:
    """An orphan of a killed launch script may write its verdict after the next job has started."""
    late = "(run_dir / 'log' / 'no-restart').write_text(json.dumps({'code': 143, 'job': 'another'}))"
    assert project.run(f"note(attempt=attempt)\nif attempt == 0: {late}, sys.exit(1)").returncode == 0
    assert len(project.notes()) == 2


def test_the_console_gets_one_line_messages_once_and_the_log_all(project: ScratchProject) -> None:
    code = """
for _ in range(3):
    print("error: no space left", file=sys.stderr)
print("warning: slow", "a traceback", "  error: indented", sep=chr(10), file=sys.stderr)
os.write(2, b"\\xff bytes" + bytes([10]) + b"error: no newline")
"""
    done = project.run(code)
    assert done.stderr.splitlines() == ["error: no space left", "warning: slow", "error: no newline"]
    text = (project.run_dir / "log" / "launcher.log").read_text(errors="replace")
    assert text.count("error: no space left") == 3
    assert "a traceback" in text
    assert "launcher.py" in text  # the log has the launcher's command


@pytest.mark.parametrize(("app", "shown"), [("toy", []), ("prefix", ["error: no space left", "warning: slow"])])
def test_what_a_launcher_puts_before_each_line_is_known_by_its_app(
    project: ScratchProject, app: str, shown: list[str]
) -> None:
    lines = ["[0]<stderr>:error: no space left", "[1]<stderr>:error: no space left", "[12]<stderr>:warning: slow"]
    code = f"import os; os.write(2, {chr(10).join(lines).encode()!r})"
    run_dir = f"--run-dir={project.run_dir}"
    done = end_of(project.script(app, "{python}", "-c", code, "--", "2", run_dir, "--dataset=mnist-5k"))
    assert (done.returncode, done.stderr.splitlines()) == (0, shown)
    assert all(line in (project.run_dir / "log" / "launcher.log").read_text() for line in lines)


def test_when_a_stalled_rank_is_named_the_job_is_ended_and_started_again(project: ScratchProject) -> None:
    """The script ends the job because of a file of another machine's watchdog. Launcher and rank ignore SIGTERM."""
    code = f"""
note(attempt=attempt, stalled=(run_dir / "log" / "stalled").exists())
if attempt == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank({STUBBORN!r}, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()
    print("error: rank 1 is stuck", file=sys.stderr, flush=True)
    stalled = {{"job": job_info["job"], "rank": 1, "host": "other", "culprit": "rank 0 waits"}}
    (run_dir / "log" / "stalled").write_text(json.dumps(stalled))
    time.sleep(600)
"""
    done = project.run(code)
    assert done.returncode == 0, done.stderr
    assert [note["stalled"] for note in project.notes()] == [False, False]
    error, reported, warning = done.stderr.splitlines()
    assert error == "error: rank 1 is stuck"
    assert reported == "error: no progress, reported by rank 1 on other: rank 0 waits"
    assert "ended with code -9; starting it again" in warning


# WATCHED is the first part of a launcher whose rank runs core's watchdog.
WATCHED = """
code = '''
import os, sys, time
from pathlib import Path
from samestep import env, log
from samestep.failures import Failure
from samestep.hooks import AppHooks
from samestep.options import Options
from samestep.recovery import watchdog
log.start(Path(sys.argv[1]), 0, False)
dog = watchdog.Watchdog()
dog.start(env.detect(os.environ), Options(timeout=float(sys.argv[2]), straggler=0.0))
dog.write_to(Path(sys.argv[1], "log"))
'''
note(attempt=attempt)
def watched(more, timeout):
    return subprocess.run([sys.executable, "-c", code + more, str(run_dir), str(timeout)]).returncode
"""


def test_what_the_watchdog_leaves_is_what_the_launch_script_looks_for(project: ScratchProject) -> None:
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif attempt == 0: watched('time.sleep(600)', 1), time.sleep(600)"
    )
    done = project.run(WATCHED + code)
    assert done.returncode == 0, done.stderr
    error, warning = done.stderr.splitlines()
    assert error.startswith("error: no progress for 1 s: rank 0 ")
    assert "ended with code -9; starting it again" in warning


@pytest.mark.parametrize(("rank", "starts"), [("sys.exit(7)", 2), ("dog.beat(1); sys.exit(7)", 3)])
def test_a_heartbeat_says_whether_a_start_got_to_a_step(project: ScratchProject, rank: str, starts: int) -> None:
    done = project.run(f"{WATCHED}sys.exit(watched({rank!r}, 60))", "1", "--max-restarts=2")
    assert done.returncode == 1
    assert len(project.notes()) == starts


def test_a_message_ends_no_job_whatever_it_says(project: ScratchProject) -> None:
    code = "note()\nprint('error: no progress for 9 s', file=sys.stderr, flush=True)\ntime.sleep(1)"
    done = project.run(code)
    assert (done.returncode, done.stderr) == (0, "error: no progress for 9 s\n")
    assert len(project.notes()) == 1


def test_what_an_earlier_job_said_of_a_stalled_rank_does_not_count(project: ScratchProject) -> None:
    (project.run_dir / "log").mkdir(parents=True)
    (project.run_dir / "log" / "stalled").write_text("{}")
    late = '(run_dir / "log" / "stalled").write_text(json.dumps({"job": "of another machine"}))'
    assert project.run(f"note()\n{late}\ntime.sleep(1)").returncode == 0
    assert len(project.notes()) == 1


def test_what_a_killed_launcher_left_is_gone_before_the_next_start(project: ScratchProject) -> None:
    code = f"""
if attempt == 0:
    ranks = [rank({SLEEPER!r}), rank({SLEEPER!r}, start_new_session=True), rank({STUBBORN!r}, stdout=subprocess.PIPE)]
    ranks[-1].stdout.readline()
    note(ranks=[each.pid for each in ranks])
    os.kill(os.getpid(), signal.SIGKILL)
before = json.loads((run_dir / "notes.jsonl").read_text().splitlines()[0])["ranks"]
def state(pid):
    try:
        return Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
note(left=[state(pid) for pid in before])
"""
    done = project.run(code)
    assert done.returncode == 0, done.stderr
    first, second = project.notes()
    assert len(first["ranks"]) == 3
    assert set(second["left"]) <= {"gone", "Z", "X"}


def test_ranks_that_a_launcher_leaves_when_it_succeeds_are_ended(project: ScratchProject) -> None:
    assert project.run(f"note(rank=rank({SLEEPER!r}, start_new_session=True).pid)").returncode == 0
    assert gone(lambda: [pid for note in project.notes() if is_running(pid := note["rank"])])


# --- signals -----------------------------------------------------------------------------------------------------

FAMILY = f"""
ranks = [
    rank({SLEEPER!r}),
    rank({SLEEPER!r}, start_new_session=True),
    rank("import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {SLEEPER!r}])"),
]
"""
WAIT = "note(ranks=[each.pid for each in ranks])\ntime.sleep(600)\n"
DEAF = f"""
ranks.append(rank({STUBBORN!r}, stdout=subprocess.PIPE, start_new_session=True))
ranks[-1].stdout.readline()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


@pytest.mark.parametrize(
    ("number", "code", "deaf"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGTERM, 143, False),
        (signal.SIGUSR1, 138, False),
        (signal.SIGHUP, 129, False),
        (signal.SIGQUIT, 131, False),
        (signal.SIGTERM, 143, True),
    ],
)
def test_a_signal_stops_all_descendants(project: ScratchProject, number: int, code: int, deaf: bool) -> None:
    """Processes in other sessions end too. Processes that ignore SIGTERM are killed after the grace."""
    process = project.start(FAMILY + (DEAF if deaf else "") + WAIT, "2", "--grace=2")
    ranks = wait_for(project.notes)[0]["ranks"]
    assert all(is_running(pid) for pid in ranks)
    process.send_signal(number)
    done = end_of(process)
    assert done.returncode == code
    expected_output = f"stopping ({signal.Signals(number).name}): the ranks save a step; again, to end at once; "
    assert done.stderr == f"{expected_output}--run-dir={project.run_dir} resumes\n"
    assert gone(lambda: [pid for pid in ranks if is_running(pid)])
    assert len(project.notes()) == 1  # the job is not restarted


def test_a_second_ctrl_c_kills_at_once(project: ScratchProject, tmp_path: Path) -> None:
    root = tmp_path / "patient"
    shutil.copytree(project.root, root)
    path = root / "launch" / "samestep_launch" / "supervise.py"
    path.write_text(re.sub(r"^STOP_SECONDS = .*", f"STOP_SECONDS = {10 * LIMIT}", path.read_text(), flags=re.MULTILINE))
    patient = ScratchProject(root, project.work)
    patient.mark = project.mark
    process = patient.start(FAMILY + DEAF + WAIT, "2", f"--grace={10 * LIMIT}")
    ranks = wait_for(project.notes)[0]["ranks"]
    process.send_signal(signal.SIGINT)
    wait_for(lambda: not is_running(ranks[0]))  # ranks that ignore SIGINT remain
    process.send_signal(signal.SIGINT)
    assert end_of(process).returncode == 130
    assert gone(lambda: [pid for pid in ranks if is_running(pid)])


def saved(project: ScratchProject) -> list[tuple[int, int]]:
    return sorted((note["saved"], note["signal"]) for note in project.notes() if "saved" in note)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_ranks_alone_get_the_signal_and_have_time_to_save(project: ScratchProject, number: int) -> None:
    """A launcher that got the signal would end with its ranks before they save, as some launchers do."""
    process = project.start(RANKS + "note()\nsys.exit(max(each.wait() for each in ranks))")
    wait_for(project.notes)
    process.send_signal(number)
    assert end_of(process).returncode == 128 + number
    assert saved(project) == [(0, number), (1, number)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_launcher_that_ends_by_a_signal_is_a_stop_and_its_ranks_save(project: ScratchProject, number: int) -> None:
    done = project.run(RANKS + f"signal.signal({number:d}, signal.SIG_DFL)\nos.kill(os.getpid(), {number:d})")
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert saved(project) == [(0, number), (1, number)]


def test_under_nohup_a_hangup_is_ignored(project: ScratchProject) -> None:
    code = "note()\nwhile not (run_dir / 'go').exists(): time.sleep(0.02)\nprint('RESULT {}')"
    process = project.start(code, ignored=[signal.SIGHUP])
    wait_for(project.notes)
    process.send_signal(signal.SIGHUP)
    (project.run_dir / "go").write_text("")
    done = end_of(process)
    assert (done.returncode, done.stdout) == (0, "RESULT {}\n")


# UNLUCKY runs in the launch script: SIGTERM arrives just after the launcher starts, or between two restarts.
UNLUCKY = """
import os, signal, subprocess, sys

def start(self, *arguments, **settings):
    launches = settings.get("start_new_session") and sys.argv[0].endswith("/launch.py")
    if launches and settings["env"]["SAMESTEP_RESTARTS"] == os.environ.get("UNLUCKY"):  # between restarts
        os.kill(os.getpid(), signal.SIGTERM)
    original(self, *arguments, **settings)
    if launches and "UNLUCKY" not in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)

original, subprocess.Popen.__init__ = subprocess.Popen.__init__, start
"""


def test_a_signal_as_the_launcher_starts_leaves_nothing_either(project: ScratchProject) -> None:
    folder = project.work / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(UNLUCKY)
    process = project.start(FAMILY + WAIT, environ={"PYTHONPATH": str(folder)})
    assert process.wait(timeout=LIMIT) == 143
    assert gone(project.processes)
    end_of(process)


def test_a_launcher_that_says_0_while_its_rank_did_not_end_well_is_started_again(project: ScratchProject) -> None:
    """msrun, for example, kills its ranks at Ctrl-C and exits with 0. A rank that succeeds removes its stack file."""
    left = "(run_dir / 'log' / 'stack-0.txt').write_text('')"
    done = project.run(f"note()\nif attempt == 0: {left}")
    assert done.returncode == 0
    assert "warning: the job ended with code 0; starting it again" in done.stderr
    assert len(project.notes()) == 2


def test_a_signal_between_restarts_is_a_stop(project: ScratchProject) -> None:
    folder = project.work / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(UNLUCKY)
    code = "heartbeat(1)\nnote()\nsys.exit(1)"
    done = end_of(project.start(code, environ={"PYTHONPATH": str(folder), "UNLUCKY": "1"}))
    assert done.returncode == 143
    assert len(project.notes()) == 1
    assert gone(project.processes)


# --- apps that measure -------------------------------------------------------------------------------------------


def bench(project: ScratchProject, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import json, os, sys; print(json.dumps(sys.argv[1:]));" + code
    template = ["{python}", "-c", program, "{app}", "{options}"]
    return end_of(project.script("bench", *template, "--", *arguments))


def test_an_app_without_resume_has_its_run_dir_resolved_and_nothing_else(project: ScratchProject) -> None:
    done = bench(project, "pass", "2", "count", "--up-to=3", f"--run-dir={project.run_dir}")
    assert done.returncode == 0, done.stderr
    app = str(project.root / "apps" / "bench")
    assert json.loads(done.stdout) == [app, "count", "--up-to=3", *2 * [f"--run-dir={project.run_dir}"]]
    assert sorted(path.name for path in project.run_dir.iterdir()) == [".lock", "log"]


def test_what_measures_may_leave_its_stacks(project: ScratchProject) -> None:
    """An app that measures does not stop its watchdogs, so their stack files stay."""
    code = "from pathlib import Path; Path(sys.argv[-1].partition('=')[2], 'log', 'stack-0.txt').write_text('')"
    assert bench(project, code, "2", "count", f"--run-dir={project.run_dir}").returncode == 0


def test_what_measures_is_not_started_again(project: ScratchProject) -> None:
    done = bench(project, "sys.exit(7)", "2", "weigh", f"--run-dir={project.run_dir}")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.startswith("error: the job ended with code 7: see ")


@pytest.mark.parametrize(
    ("arguments", "expected_output"),
    [
        (["2"], "the following arguments are required: COMMAND"),
        (["2", "weight"], "invalid choice: 'weight'"),
        (["2", "--up-to=3", "count"], "put it after its command"),
        (["2", "count", "--upto=3"], "did you mean --up-to?"),
        (["2", "weigh", "--up-to=3"], "put it after its command (see COMMAND --help)"),
        ([], "run_bench.sh N COMMAND [options], for example: bash scripts/run_bench.sh 4 all"),
    ],
    ids=str,
)
def test_a_mistake_with_a_command_is_one_line(
    project: ScratchProject, arguments: list[str], expected_output: str
) -> None:
    done = bench(project, "pass", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert expected_output in done.stderr


def test_each_command_has_its_help(project: ScratchProject) -> None:
    everything = bench(project, "pass", "--help").stdout
    assert "run_bench.sh N COMMAND [options]" in everything
    assert "weigh" in everything
    assert "resumes" not in everything
    assert "--up-to" in bench(project, "pass", "2", "count", "--help").stdout
    assert "--up-to" not in bench(project, "pass", "2", "weigh", "--help").stdout


# --- run dirs ----------------------------------------------------------------------------------------------------

SAVE = """
sys.path[:0] = [{options!r}]
import numpy as np
from options import parse
from samestep import checkpoint
from samestep.options import resume_invariants

note(attempt=attempt)
if {step}:
    arrays = {{"model": {{"w": np.zeros(3)}}}}
    checkpoint.save(run_dir, "toy", {step}, arrays, {{}}, resume_invariants(parse(options)), keep=3)
    checkpoint.finish()
"""


def saving(project: ScratchProject, step: int) -> str:
    return SAVE.format(options=str(project.root / "apps" / "toy"), step=step)


def test_another_runs_checkpoint_is_refused_before_anything_starts(project: ScratchProject) -> None:
    assert project.run(saving(project, 4), "1", "--seed=1").returncode == 0
    done = project.run(saving(project, 0), "1", "--seed=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "--seed 1 in the checkpoint, 2 now" in done.stderr
    assert len(project.notes()) == 1
    assert project.run(saving(project, 0), "3", "--seed=1", "--epochs=9").returncode == 0  # N and --epochs may change


def test_the_launch_script_reads_no_arrays(project: ScratchProject) -> None:
    """Rank 0 detects a damaged array when it reads the checkpoint. The launch script does not read or move it."""
    assert project.run(saving(project, 4), "1").returncode == 0
    arrays = project.run_dir / "checkpoints" / "step-00000004" / "model.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"x")
    done = project.run(saving(project, 0), "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(project.notes()) == 2
    assert arrays.exists()


def test_damaged_checkpoints_stop_the_run_and_no_resume_sets_them_aside(project: ScratchProject) -> None:
    assert project.run(saving(project, 4), "1").returncode == 0
    (project.run_dir / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    done = project.run(saving(project, 0), "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "step-00000004" in done.stderr
    assert len(project.notes()) == 1
    assert project.run(saving(project, 0), "1", "--no-resume").returncode == 0
    assert len(list(project.run_dir.glob("earlier-*/checkpoints/step-00000004"))) == 1
    assert not (project.run_dir / "checkpoints").exists()


def test_a_second_job_on_the_same_run_dir_waits_and_names_the_first(project: ScratchProject) -> None:
    first = project.start("note()\nwhile not (run_dir / 'go').exists(): time.sleep(0.02)")
    wait_for(project.notes)
    second = project.run("note()")
    assert second.returncode == 2
    waiting, refused = second.stderr.splitlines()
    assert waiting.startswith("warning: ")
    assert refused.startswith("error: ")
    assert f"pid {first.pid}" in refused
    assert len(project.notes()) == 1
    (project.run_dir / "go").write_text("")
    assert end_of(first).returncode == 0
    assert project.run("note()").returncode == 0


def test_a_run_dir_that_cannot_be_made_is_one_line(project: ScratchProject) -> None:
    (project.work / "file").write_text("")
    done = project.run("note()", "1", "--run-dir=file/run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot make ")
    assert len(done.stderr.splitlines()) == 1


def test_a_default_run_dir_that_cannot_be_made_is_one_line(project: ScratchProject) -> None:
    (project.work / "runs").write_text("")
    done = end_of(project.script("toy", "{python}", "-c", "pass", "--", "1", "--dataset=mnist-5k"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot make ")
    assert len(done.stderr.splitlines()) == 1
