"""Test ``samestep run``, which restarts and stops any Python program and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_running
from repository import REPOSITORY
from samestep.job_info import JobInfo
from samestep_launch import fork_server, job
from samestep_launch.run_command import LAUNCHERS
from scratch_project import CORE, LIMIT, SLEEPER, ScratchProject, end_of, environment, gone, wait_for

# TORCHRUN is a module of a fake package torch. It starts ranks as processes, and ends with the largest exit code.
TORCHRUN = """
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
ranks = int([word.partition("=")[2] for word in options if word.startswith("--nproc-per-node")][0])
program = sys.argv[1 + 6:]
assert len(options[:6]) == 6 and not program[0].startswith("--"), sys.argv
environs = [{**os.environ, "WORLD_SIZE": str(ranks), "RANK": str(rank)} for rank in range(ranks)]
started = [subprocess.Popen([sys.executable, *program], env=environ) for environ in environs]
sys.exit(max(abs(each.wait()) for each in started))
"""
NOTE = """
import json, os, sys, time
from pathlib import Path
run_dir, start = Path(os.environ["SAMESTEP_RUN_DIR"]), int(os.environ["SAMESTEP_RESTARTS"])
launcher = int(json.loads(os.environ["SAMESTEP_JOB_INFO"])["launcher"].partition("@")[0])

def note(**values):
    with (run_dir / "notes.jsonl").open("a") as file:
        file.write(json.dumps({"rank": os.environ.get("RANK"), "start": start, **values}) + chr(10))
"""


class Command:
    """Run ``python -m samestep`` in a scratch folder."""

    def __init__(self, project: ScratchProject) -> None:
        self.project = project
        self.work = project.work
        self.run_dir = project.run_dir
        self.path = [str(CORE)]

    def add_torch(self) -> None:
        package = self.work / "packages" / "torch" / "distributed"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        (package / "run.py").write_text(TORCHRUN)
        self.path.append(str(self.work / "packages"))

    def call(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "samestep", *words],
            cwd=self.work,
            env=environment(PYTHONPATH=os.pathsep.join(self.path), SAMESTEP_TEST=self.project.mark, **environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT
        )

    def start(self, code: str, *words: str, arguments: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        (self.work / "program.py").write_text(NOTE + code)
        return self.call("run", f"--run-dir={self.run_dir}", *words, "program.py", *arguments, **environ)

    def run(self, code: str, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        return end_of(self.start(code, *words, **settings))


@pytest.fixture
def command(project: ScratchProject) -> Iterator[Command]:
    yield Command(project)
    assert gone(project.processes)


def test_help_teaches(command: Command) -> None:
    done = end_of(command.call("run", "--help"))
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "samestep run -n 4 train.py",
        "SAMESTEP_RUN_DIR",
        "exit codes: 0 done",
        *LAUNCHERS,
        "--max-restarts R",
    ):
        assert text in done.stdout
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    assert "run" in end_of(command.call("--help")).stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "COMMAND"),
        (["rnu"], "'rnu'"),
        (["run"], "required: PROGRAM"),
        (["run", "none.py"], "PROGRAM none.py: the file is missing"),
        (["run", "."], "PROGRAM .: the file is missing"),
        (["run", "-n", "0", "p.py"], "--nproc=0 is not a whole number from 1 to 100000"),
        (["run", "-n", "2", "p.py"], "has no torch: name a --launcher of torchrun, "),
        (["run", "--launcher=torchrun", "p.py"], "--launcher torchrun: "),
        (["run", "--launcher=srun", "p.py"], "invalid choice: 'srun'"),
        (["run", "--start-method=fork", "--launcher=mpirun", "p.py"], "fork needs torchrun, not --launcher mpirun"),
        (["run", "--start-method=fork", "p.py"], "fork needs torchrun, but "),
        (["run", "--start-method=spawn", "p.py"], "invalid choice: 'spawn'"),
        (["run", "--max-restart=1", "p.py"], "did you mean --max-restarts?"),
        (["run", "--grace=0", "p.py"], "--grace"),
        (["run", "--run-dir=p.py", "p.py"], "--run-dir p.py is not a directory"),
        (["run", "--run-dir=", "p.py"], "--run-dir: the value is empty: name a path, or leave the option out"),
        (["run", "--run-dir=a\nb", "p.py"], r"--run-dir '/"),
        (["run", "--run-dir=a\udcffb", "p.py"], r"a\udcffb' is not UTF-8"),
        (["run", f"--run-dir={'x' * 300}", "p.py"], ": File name too long: "),
        (["run", "x" * 300], "File name too long"),
        (["run", "a\nb.py"], r"a\nb.py' has a control character"),
        (["run", "p.py", "\udcff"], r"the argument '\udcff' is not UTF-8"),
        (["run", "-n", "1000000", "p.py"], "--nproc=1000000 is not a whole number from 1 to 100000"),
        (["run", "--timeout=1e30", "p.py"], "'1e30' is not a finite number"),
        (["run", "--grace=1e30", "p.py"], "'1e30' is not a finite number"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command: Command, words: list[str], text: str) -> None:
    (command.work / "p.py").write_text("")
    done = end_of(command.call(*words, PATH="/usr/bin:/bin"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in command.work.iterdir()] == ["p.py"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], " has no torch: name a --launcher of torchrun, msrun, paddle"),
        (["--launcher=mpirun"], "--launcher mpirun starts ranks on one machine, but the job has 2: use --launcher "),
    ],
)
def test_a_launcher_that_would_start_a_job_on_each_machine_is_refused(
    command: Command, words: list[str], text: str
) -> None:
    (command.work / "p.py").write_text("")
    machines = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = end_of(command.call("run", *words, "p.py", **machines))
    assert done.returncode == 2, done
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_program_gets_its_arguments_its_run_dir_and_no_other_jobs_variables(command: Command) -> None:
    code = "note(arguments=sys.argv[1:], environ=dict(os.environ)); print('out'); print('err', file=sys.stderr)"
    arguments = ("-n", "3", "--run-dir=mine", "--", "--help")
    done = command.run(
        code, arguments=arguments, SAMESTEP_RUN_DIR="/other", SAMESTEP_JOB_INFO='{"job":"other","errors":8}'
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")
    (note,) = command.project.notes()
    assert note["arguments"] == [*arguments]
    environ = note["environ"]
    info = JobInfo.from_environ(environ)
    assert (info.run_dir, info.ranks) == (str(command.run_dir), 1)
    assert info.job != "other"
    assert "RANK" not in environ


def test_the_default_run_dir_is_new(command: Command) -> None:
    (command.work / "program.py").write_text("import os; print(os.environ['SAMESTEP_RUN_DIR'])")
    both = [end_of(command.call("run", "program.py")).stdout.strip() for _ in range(2)]
    assert len({*both}) == 2
    assert {Path(each).parent for each in both} == {command.work / "runs" / "program"}


def test_with_torch_its_launcher_starts_the_ranks(command: Command) -> None:
    command.add_torch()
    done = command.run("note(size=os.environ['WORLD_SIZE'])", "-n", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted((note["rank"], note["size"]) for note in command.project.notes()) == [(str(r), "3") for r in range(3)]


def test_a_program_without_samestep_is_restarted_after_failures(command: Command) -> None:
    done = command.run("note(); sys.exit(7 if start < 2 else 0)")
    assert done.returncode == 0
    assert [note["start"] for note in command.project.notes()] == [0, 1, 2]
    again = [rf"warning: the job ended with code 7; starting it again \({number} of 3\), .*" for number in (1, 2)]
    assert re.fullmatch("\n".join([*again, ""]), done.stderr)


def test_after_so_many_restarts_it_gives_up(command: Command) -> None:
    done = command.run("note(); sys.exit(7)", "--max-restarts=1")
    assert done.returncode == 1
    assert len(command.project.notes()) == 2
    last = f"error: the job ended with code 7 after 1 restarts: see {command.run_dir}/log/launcher.log and rank-*.log"
    assert done.stderr.splitlines()[-1] == last


def test_failures_and_stops_are_recorded(command: Command) -> None:
    process = command.start("note()\nif start == 0: sys.exit(3)\ntime.sleep(600)")
    wait_for(lambda: len(command.project.notes()) == 2)
    process.send_signal(signal.SIGTERM)
    assert end_of(process).returncode == 143
    lines = (command.run_dir / "log" / "events.jsonl").read_text().splitlines()
    assert [(event["kind"], event["source"]) for event in map(json.loads, lines)] == [
        ("failure", "launcher"),
        ("signal", "launcher"),
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_is_forwarded_and_nothing_is_left(command: Command, number: int, code: int) -> None:
    command.add_torch()
    child = f"subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}], start_new_session=True).pid"
    process = command.start(f"import subprocess\nnote(pids=[os.getpid(), {child}])\ntime.sleep(600)", "-n", "2")
    wait_for(lambda: len(command.project.notes()) == 2)
    pids = [pid for note in command.project.notes() for pid in note["pids"]]
    assert all(map(is_running, pids))
    process.send_signal(number)
    done = end_of(process)
    first, *others = done.stderr.splitlines()
    assert (done.returncode, first) == (code, f"stopping ({signal.Signals(number).name})")
    assert others.count("KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)  # as Python reports Ctrl-C
    assert bool(others) == (number == signal.SIGINT)
    assert gone(lambda: [pid for pid in pids if is_running(pid)])


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGUSR1, 1),
        (signal.SIGINT, 2),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.soak),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.soak),
    ],
)
def test_a_programs_own_handler_gets_the_signal_that_arrived_once(command: Command, number: int, ranks: int) -> None:
    """One rank needs no launcher; two ranks need torchrun. Children of a rank get no signal while the rank saves."""
    if ranks > 1:
        command.add_torch()
    code = f"""
import signal, subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", {SLEEPER!r}])
def save(number, frame):
    note(got=number)
    time.sleep(0.5)
    note(child=child.poll())
    sys.exit(0)
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(each, save)
note(ready=True)
time.sleep(600)
"""
    process = command.start(code, "-n", str(ranks))
    wait_for(lambda: len(command.project.notes()) == ranks)
    process.send_signal(number)
    assert end_of(process).returncode == 128 + number
    notes = command.project.notes()
    assert [note["got"] for note in notes if "got" in note] == [number] * ranks
    assert [note["child"] for note in notes if "child" in note] == [None] * ranks


# Children of a program that change their session, environment, parent or process title.
LEAVERS = """
import ctypes, subprocess

def change_title():  # as setproctitle does, which overwrites the environment too
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))

def leave():
    os.setsid()
    if os.fork():
        os._exit(0)
    change_title()
    note(pid=os.getpid())
    time.sleep(600)

empty = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True, stderr=subprocess.DEVNULL)
note(pid=empty.pid)
if os.fork() == 0:
    leave()
while len((run_dir / "notes.jsonl").read_text().splitlines()) < 2 * (start + 1):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "code", "starts"),
    [
        ("sys.exit(3)", 1, 2),
        pytest.param("sys.exit(0)", 0, 1, marks=pytest.mark.soak),
        pytest.param("os.kill(os.getpid(), 9)", 1, 2, marks=pytest.mark.soak),
        ("os.kill(launcher, 15)\ntime.sleep(600)", 143, 1),
    ],
)
def test_no_descendant_outlives_the_start_that_it_belongs_to(
    command: Command, end: str, code: int, starts: int
) -> None:
    """Each start checks that the processes of the previous start have ended."""
    check = """
before = [json.loads(line)["pid"] for line in open(run_dir / "notes.jsonl")] if start else []
assert not any(os.path.exists(f"/proc/{pid}") for pid in before), before
"""
    done = command.run(check + LEAVERS + end, "--max-restarts=1")
    pids = [note["pid"] for note in command.project.notes()]
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (done.returncode, len(pids), left) == (code, 2 * starts, []), done.stderr


def test_a_bar_without_a_newline_appears_while_the_program_runs(command: Command) -> None:
    """The program ends only after the test has read the bar."""
    code = """
print(chr(13) + "1/9 [bar]", end="", file=sys.stderr, flush=True)
while not (run_dir / "seen").exists():
    time.sleep(0.02)
"""
    process = command.start(code)
    assert process.stderr is not None
    shown = ""
    while "1/9 [bar]" not in shown:
        assert select.select([process.stderr], [], [], LIMIT)[0], shown
        shown += os.read(process.stderr.fileno(), 100).decode()
    (command.run_dir / "seen").touch()
    assert end_of(process).returncode == 0


@pytest.mark.parametrize("megabytes", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_line_without_an_end_needs_no_memory(command: Command, megabytes: int) -> None:
    """The program reads the launch script's peak memory before and after the line."""
    code = f"""
def peak():
    lines = open(f"/proc/{{launcher}}/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
for _ in range({megabytes}):
    sys.stderr.write("x" * 2**20)
sys.stderr.write("\\nthe end\\n")
note(kilobytes=peak() - before)
"""
    done = command.run(code)
    assert done.returncode == 0
    assert command.project.notes()[0]["kilobytes"] < 50_000
    log = command.run_dir / "log" / "launcher.log"
    assert log.stat().st_size > megabytes * 2**20
    assert done.stderr.endswith("x [...]\nthe end\n")


def test_a_mistake_that_a_program_reports_ends_the_job_with_2_after_one_start(command: Command) -> None:
    """The program reports the mistake before it opens log files, as for a wrong option."""
    code = """
from samestep import ConfigError, log
def main():
    note()
    raise ConfigError("--lr fast is not a number: give a number")
log.run(main)
"""
    done = command.run(code)
    assert (done.returncode, done.stderr) == (2, "error: --lr fast is not a number: give a number\n")
    assert len(command.project.notes()) == 1


# FAILS raises an error. The step of its monitor is 7.
FAILS = """
from samestep import ConfigError, RetryableError, log
from samestep.monitor import Monitor

class AtStep(Monitor):
    step = 7

def main():
    log.start(run_dir, 0, False, AtStep())
    note()
    raise {error}
log.run(main)
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "ValueError(f'sample 700 is damaged, seen by pid {os.getpid()}')",
            "rank 0: ValueError: sample 700 is damaged",
        ),
        ("RetryableError('not saved; a restart helps', repeated='buffers differ')", "buffers differ"),
    ],
)
def test_the_same_error_at_the_same_step_is_not_started_a_third_time(command: Command, error: str, text: str) -> None:
    done = command.run(FAILS.format(error=error))
    assert (done.returncode, len(command.project.notes())) == (1, 2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: the job failed twice with the same error at step 7: {text}")


@pytest.mark.parametrize(
    "error", ["ValueError(f'sample {start} is damaged')", "RuntimeError('Connection closed by peer')"]
)
def test_an_error_that_a_restart_may_fix_gets_all_restarts(command: Command, error: str) -> None:
    assert command.run(FAILS.format(error=error)).returncode == 1
    assert len(command.project.notes()) == 4


def test_a_program_has_its_grace_to_handle_term(command: Command) -> None:
    code = """
import signal
def save(number, frame):
    time.sleep(2)
    note(saved=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
note()
time.sleep(600)
"""
    process = command.start(code, "--grace=20")
    wait_for(command.project.notes)
    process.send_signal(signal.SIGTERM)
    assert end_of(process).returncode == 143
    assert command.project.notes()[-1]["saved"]


def test_a_program_that_uses_checkpoints_resumes(command: Command) -> None:
    code = """
import numpy as np
from samestep import checkpoint
found = checkpoint.newest(run_dir, warn=print)
step = found.step if found else 0
note(resumed=step)
checkpoint.save(run_dir, "mine", step + 1, {"model": {"w": np.full(3, step)}}, {}, {}, keep=2)
checkpoint.finish()
sys.exit(step < 2)
"""
    assert command.run(code).returncode == 0
    assert [note["resumed"] for note in command.project.notes()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("mnist_ddp", "torchrun"),
        ("lenet_paddle", "paddle"),
        ("mnist_horovod", "horovodrun"),
        ("resnet50_mindspore", "msrun"),
    ],
)
def test_the_templates_are_those_of_the_launch_scripts(tmp_path: Path, script: str, name: str) -> None:
    words = ["bash", str(REPOSITORY / "scripts" / f"run_{script}.sh"), "3", "--dry-run", "--run-dir=r"]
    environ = environment(PYTHON="/python", MASTER_PORT="29400")
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT, check=True)
    words = [job.TORCHRUN if word == fork_server.MODULE else word for word in shlex.split(done.stdout)]
    words = [word for word in words if word != "--start-method=fork"]  # the default of the scripts, not of the command
    words = words[1:] if words[0] == "env" else words  # the test gives no GPUs to paddle
    values = {"python": "/python", "nproc": 3, "nnodes": 1, "node_rank": 0, "world_size": 3, "master_addr": "127.0.0.1"}
    values |= {"master_port": 29400, "host": "127.0.0.1", "log_dir": "r/log"}
    train = REPOSITORY / "apps" / script / "train.py"
    assert [*LAUNCHERS[name].command.format(**values).split(), str(train), "--run-dir=r"] == words
