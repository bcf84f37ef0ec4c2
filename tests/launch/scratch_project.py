"""Make a scratch project for tests of launch scripts: copies of the packages and of scripts/launch.*, and toy apps.

Tests start it with bash, as a user does. Its launchers and ranks are small programs of the standard library, which run
as processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import marked
from repository import PACKAGES, REPOSITORY

CORE = REPOSITORY / "core"
LAUNCH = REPOSITORY / "launch"
LIMIT = 40.0  # seconds; every wait ends sooner
OURS = re.compile(
    "RANK|WORLD_SIZE|NNODES|NODE_RANK|MASTER_.*|PET_.*|NPROC_PER_NODE|JOB_COMPLETION_INDEX|SAMESTEP_.*|PYTHON|OMP_NUM_.*"
)

OPTIONS = """
from samestep.hooks import AppHooks
from samestep.options import Parser, add_common

def build_parser(prog=None, usage=None):
    parser = Parser(prog=prog, usage=usage)
    add_common(parser, epochs=1, global_batch_size=8, lr="0.1", datasets=("mnist-5k", "mnist"), devices=("auto", "cpu"))
    return parser

def parse(argv, prog=None, usage=None):
    return build_parser(prog, usage).parse(argv)

HOOKS = AppHooks()
"""
# Options of an app that measures, as collectives_lab does: it has commands, but no dataset and no checkpoints.
BENCH_OPTIONS = """
from pathlib import Path
from samestep.hooks import AppHooks
from samestep.options import Parser

COMMANDS = {"weigh": "a thing", "count": "many"}

def build_parser(prog=None, usage=None):
    parser = Parser(prog=prog, usage=usage)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--run-dir", type=Path)
    command.add_argument("--up-to", type=int)
    return parser

def parse(argv, prog=None, usage=None):
    return build_parser(prog, usage).parse(argv)

HOOKS = AppHooks(commands=COMMANDS)
"""
# Options of an app whose launcher puts a prefix before each line of a rank's stderr.
PREFIX_OPTIONS = OPTIONS + 'HOOKS = AppHooks(line_prefix=r"\\[\\d+\\]<stderr>:")\n'
# Options of an app that reads its machines from a file, by the module table.py in its folder. The app also checks the
# start, when its dataset and step are known.
TABLE_OPTIONS = (
    OPTIONS
    + """
def find_machines(options, ranks):
    from table import place
    return place(ranks)

def check_start(options, dataset, step):
    if options.epochs == 7:
        from samestep import ConfigError
        raise ConfigError(f"7 epochs of {dataset} from step {step}: choose another number")

HOOKS = AppHooks(find_machines=find_machines, check_start=check_start)
"""
)
TABLE = """
import os
from samestep import ConfigError

def place(ranks):
    if ranks != 2:
        raise ConfigError(f"N={ranks}, but the table lists 2: give N=2")
    return (3, 1) if os.environ.get("TABLE") else None
"""
# Every launcher begins with LAUNCHER: note() writes a line for the test, heartbeat() writes a rank's heartbeat, and
# rank() starts a child process.
LAUNCHER = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path

nproc, port, *options = sys.argv[1:]
run_dir = Path([option.split("=", 1)[1] for option in options if option.startswith("--run-dir=")][-1])
attempt = int(os.environ["SAMESTEP_RESTARTS"])
job_info = json.loads(os.environ["SAMESTEP_JOB_INFO"])

def note(**values):
    with (run_dir / "notes.jsonl").open("a") as file:
        file.write(json.dumps(values) + chr(10))

def heartbeat(updates, rank=0, job=job_info["job"]):
    content = {"job": job, "host": socket.gethostname(), "updates": updates}
    (run_dir / "log" / f"alive-{rank}").write_text(json.dumps(content))

def rank(code, **settings):
    return subprocess.Popen([sys.executable, "-S", "-c", code], **settings)
"""
SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
# RANKS starts two ranks with heartbeats. Each rank records its signal after 0.5 s, and then ends.
RANKS = """
def saver(rank):
    return f'''
import json, os, signal, socket, sys, time
from pathlib import Path
def save(number, frame):
    time.sleep(0.5)
    with Path({str(run_dir / "notes.jsonl")!r}).open("a") as file:
        file.write(json.dumps({{"saved": {rank}, "signal": number}}) + chr(10))
    os._exit(128 + number)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, save)
path = Path({str(run_dir / "log")!r}, "alive-{rank}")
content = {{"job": "{job_info["job"]}", "host": socket.gethostname(), "pid": os.getpid(), "updates": 1}}
path.with_suffix(".tmp").write_text(json.dumps(content))
path.with_suffix(".tmp").rename(path)  # at once, as a rank's heartbeat
time.sleep(600)
'''

ranks = [rank(saver(each), start_new_session=True) for each in range(2)]
while not all((run_dir / "log" / f"alive-{each}").exists() for each in range(2)):
    time.sleep(0.02)
"""


def environment(**changes: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}, **changes}


def wait_for(what: Callable[[], Any]) -> Any:
    return processes.wait_for(what, LIMIT)


def gone(pids: Callable[[], Sequence[int]]) -> bool:
    """Return whether all processes end within 5 s. A killed process does not end at once."""
    deadline = time.monotonic() + 5
    while pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not pids()


class ScratchProject:
    """A scratch repository with toy apps. Its processes have a mark in their environment, by which tests find them."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root = root
        self.work = work
        self.run_dir = work / "run"
        self.mark = uuid.uuid4().hex
        work.mkdir(exist_ok=True)

    def start(self, launcher: str, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
        """Start scripts/launch.sh for the app toy, with the program ``launcher`` as its launcher."""
        path = self.work / "launcher.py"
        path.write_text(LAUNCHER + launcher)
        template = ["{python}", str(path), "{nproc}", "{master_port}", "{options}"]
        words = arguments or ("2",)
        if not any(word.startswith("--run-dir") for word in words):
            words = (*words, f"--run-dir={self.run_dir}")
        return self.script("toy", *template, "--", *words, "--dataset=mnist-5k", **settings)

    def script(
        self, *words: str, ignored: Sequence[int] = (), environ: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        def signals() -> None:  # as in a login shell, independent of this process's own signals
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "launch.sh"), *words],
            cwd=self.work,
            env=environment(**{"PYTHON": sys.executable, "SAMESTEP_TEST": self.mark, **(environ or {})}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=signals,
            start_new_session=True,
        )

    def run(self, launcher: str, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        return end_of(self.start(launcher, *arguments, **settings))

    def notes(self) -> list[dict[str, Any]]:
        path = self.run_dir / "notes.jsonl"
        if path.exists():
            return [json.loads(line) for line in path.read_text().splitlines()]
        return []

    def processes(self) -> list[int]:
        return marked("SAMESTEP_TEST", self.mark)


def end_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="session")
def project_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for folder in PACKAGES:
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=CACHES)
    (root / "scripts").mkdir()
    for door in ("launch.py", "launch.sh"):
        shutil.copy(REPOSITORY / "scripts" / door, root / "scripts")
    apps = {"toy": OPTIONS, "prefix": PREFIX_OPTIONS, "bench": BENCH_OPTIONS, "table": TABLE_OPTIONS}
    for app, options in apps.items():
        (root / "apps" / app).mkdir(parents=True)
        (root / "apps" / app / "options.py").write_text(options)
        (root / "apps" / app / "requirements.in").write_text(f"# {app} needs nothing\n")
        (root / "apps" / app / "requirements-cpu.txt").write_text("# Nothing\n")
    (root / "apps" / "table" / "table.py").write_text(TABLE)
    for name, constant, seconds in (
        ("launch/samestep_launch/supervise.py", "STOP_SECONDS", "1.5"),
        ("launch/samestep_launch/supervise.py", "DIAGNOSIS_SECONDS", "1.5"),
        ("launch/samestep_launch/supervise.py", "START_SECONDS", "1.5"),
        ("launch/samestep_launch/supervise.py", "OUTPUT_SECONDS", "0.3"),
        ("launch/samestep_launch/preemption.py", "POLL_SECONDS", "0.2"),
        ("core/samestep/rundir.py", "LOCK_SECONDS", "0.5"),
        ("launch/samestep_launch/preflight.py", "WAIT_NOTICE_AFTER", "1.5"),
    ):
        path = root / name
        text, count = re.subn(rf"^{constant} = [\d.]+", f"{constant} = {seconds}", path.read_text(), flags=re.MULTILINE)
        assert count == 1
        path.write_text(text)
    return root


@pytest.fixture
def project(project_root: Path, tmp_path: Path) -> Iterator[ScratchProject]:
    """Make a scratch project, and check after the test that none of its processes is left."""
    made = ScratchProject(project_root, tmp_path / "work")
    yield made
    left = [] if gone(made.processes) else made.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == [], "processes were left behind"
