"""Test calls of a launch script that once caused a traceback, a hang, or exit code 0 without a job.

The calls use unusual paths, names and streams, and environment variables that bash and Python read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attempts import DONE, Attempt, check
from repository import REPOSITORY, ran
from scratch_project import LAUNCHER, LIMIT, ScratchProject, environment

NOBODY = 65534
LONG = "x" * 300


def loop(project: ScratchProject) -> Mapping[str, str]:
    """Create a symbolic link that points to itself."""
    (project.work / "loop").symlink_to("loop")
    return {}


def neighbor(project: ScratchProject) -> Mapping[str, str]:
    """Write model.py beside the launcher, as in an app's folder."""
    (project.work / "model.py").write_text("")
    return {}


def linked(project: ScratchProject) -> Mapping[str, str]:
    (project.work / "a\nb").mkdir()
    (project.work / "link").symlink_to("a\nb")
    return {}


PATHS = ("--run-dir", "--data-dir", "--init-from")
ATTEMPTS = [
    *(
        Attempt(3, f"{name} is long", 2, f"{name} x+: File name too long", arguments=("2", f"{name}={LONG}"))
        for name in PATHS
    ),
    *(
        Attempt(3, f"{name} is a loop", 2, f"{name} loop: Too many", arguments=("2", f"{name}=loop"), prepare=loop)
        for name in PATHS
    ),
    Attempt(3, "SAMESTEP_LOCK is long", 2, "SAMESTEP_LOCK=x+: ", environ={"SAMESTEP_LOCK": LONG, "PYTHON": ""}),
    *(
        Attempt(12, f"{name} is not UTF-8 ({locale})", 2, rf"'{name}=r\\udcff' is not UTF-8",
                arguments=("2", f"{name}=r\udcff"), environ={"LC_ALL": locale})
        for name in PATHS
        for locale in ("C", "C.UTF-8")
    ),
    Attempt(14, "PYTHONSAFEPATH", 0, prepare=neighbor, environ={"PYTHONSAFEPATH": "1"},
            launcher=f"import model\n{DONE}", starts=1),
    Attempt(18, "N is large", 2, "N=100001 is not a whole number from 1 to 100000", arguments=("100001",)),
    Attempt(18, "SAMESTEP_TRACK_SECONDS is not a number", 2, "SAMESTEP_TRACK_SECONDS=nan: give",
            arguments=("2", "--track=wandb"), environ={"SAMESTEP_TRACK_SECONDS": "nan"}),
    Attempt(21, "PYTHON exits with 0", 2, "PYTHON=/bin/true is not a Python of at", environ={"PYTHON": "/bin/true"}),
    Attempt(21, "PYTHON is echo", 2, "PYTHON=echo is not a Python of at least 3.9", environ={"PYTHON": "echo"}),
    Attempt(21, "PYTHONHOME is not one", 2, "PYTHONHOME is set: unset", environ={"PYTHONHOME": "/dev", "PYTHON": ""}),
    Attempt(23, "--run-dir has a newline", 2, r"--run-dir '.*/a\\nb' has a control", arguments=("2", "--run-dir=a\nb")),
    Attempt(23, "--run-dir leads to a newline", 2, r"--run-dir '.*/a\\nb' has a", arguments=("2", "--run-dir=link"),
            prepare=linked),
    Attempt(23, "PYTHON has a newline", 2, "PYTHON=a.b is not an executable", environ={"PYTHON": "a\nb"}),
]  # fmt: skip


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=str)
def test_an_attempt_ends_as_the_table_says(project: ScratchProject, attempt: Attempt) -> None:
    check(project, attempt)
    assert not (project.work / "runs").exists()


Done = subprocess.CompletedProcess[str]


def call(root: Path, cwd: Path, *words: str, bash: str = 'exec "$@"', **settings: Any) -> Done:
    """Run a project's launch script by the bash code ``bash``, which gets the command as ``"$@"``."""
    launcher = cwd / "launcher.py"
    environ = environment(**{"PYTHON": sys.executable, **settings.pop("environ", {})})
    template = ["{python}", str(launcher), "{nproc}", "{master_port}", "{options}"]
    command = ["bash", str(root / "scripts" / "launch.sh"), "toy", *template, "--", *words]
    return ran(cwd, "bash", "-c", bash, "bash", *command, environ=environ, limit=LIMIT, **settings)


def one_error(done: Done) -> str:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert re.fullmatch("error: .*\n", done.stderr), done.stderr
    return done.stderr


# --- another user --------------------------------------------------------------------------------------------------


class Stranger:
    """A copy of the project for another user (nobody if tests run as root), and a folder that this user cannot read."""

    def __init__(self, root: Path) -> None:
        self.root = root / "project"
        self.work = root / "work"
        self.private = root / "private"
        self.is_root = os.geteuid() == 0
        self.python = "/usr/bin/python3" if self.is_root else sys.executable  # other users cannot run root's Python

    def call(self, *words: str, **environ: str) -> Done:
        user: Any = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if self.is_root else {}
        return call(self.root, self.work, *words, environ={"PYTHON": self.python, "HOME": "/", **environ}, **user)


@pytest.fixture
def stranger(project_root: Path) -> Iterator[Stranger]:
    folder = Path(tempfile.mkdtemp(prefix="samestep-test-", dir="/tmp"))  # pytest's folder is private to its user
    try:
        made = Stranger(folder)
        shutil.copytree(project_root, made.root, symlinks=True)
        made.work.mkdir()
        made.private.mkdir()
        (made.private / "python").symlink_to(made.python)
        made.root.chmod(0o755)
        for path in (folder, made.work):
            path.chmod(0o777)
        made.private.chmod(0)
        if "choose" not in (error := made.call("0").stderr) and "whole number" not in error:
            pytest.skip(f"no Python that another user may run: {error}")
        yield made
    finally:
        made.private.chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize("option", ["--run-dir", "--data-dir", "--init-from"])
def test_a_path_that_the_user_may_not_look_at_is_one_line(stranger: Stranger, option: str) -> None:
    path = stranger.private / "x"
    assert f"{option} {path}: Permission denied: name " in one_error(stranger.call("2", f"{option}={path}"))


def test_an_environment_whose_python_is_another_users_is_one_line(stranger: Stranger) -> None:
    venv = stranger.root / ".venvs" / "toy"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(stranger.private / "python")
    (venv / "samestep-stamp").write_text("3.11.0")
    path = os.path.dirname(stranger.python)
    error = one_error(stranger.call("2", PYTHON="", PATH=f"{path}:/usr/bin:/bin"))
    assert f"{venv}/bin/python leads to {stranger.private}/python, which this user cannot run: name an" in error


# --- the place -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new\nline", "bell\a", "byte\udcff", "a:b"])
def test_a_project_in_a_folder_that_no_line_can_hold_is_refused(project_root: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    shutil.copytree(project_root, root)
    error = one_error(call(root, tmp_path, "2"))
    assert error.startswith("error: the project's folder ")
    assert not (root / ".venvs").exists()


def test_a_working_directory_that_no_line_can_hold_is_refused(project_root: Path, tmp_path: Path) -> None:
    """The folder's name contains a newline, and the default run dir would be in this folder."""
    folder = tmp_path / "new\nline"
    folder.mkdir()
    assert one_error(call(project_root, folder, "2")).startswith("error: --run-dir '/")


def test_a_deleted_working_directory_is_refused(project_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    done = call(project_root, folder, "2", bash=f'rmdir "{folder}"; exec "$@"')
    lines = [line for line in done.stderr.splitlines() if "getcwd" not in line]  # bash prints these
    assert (done.returncode, lines) == (2, ["error: the working directory is gone: change to another one"])


@pytest.mark.parametrize("content", [b"samestep \xff\0", None])
def test_a_file_beside_the_app_that_is_no_program_is_left_alone(
    project_root: Path, tmp_path: Path, content: bytes | None
) -> None:
    root = tmp_path / "project"
    shutil.copytree(project_root, root)
    if content is None:
        os.mkfifo(root / "apps" / "toy" / "notes.py")
    else:
        (root / "apps" / "toy" / "notes.py").write_bytes(content)
    done = call(root, tmp_path, "2", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_file_of_the_job(project_root: Path, tmp_path: Path, closed: str) -> None:
    """A launcher whose streams are closed loses its output, and no other file receives the output."""
    run_dir = tmp_path / "run"
    shows = "import os\nfor number in range(3):\n    os.fstat(number)\nos.write(1, b'out'); note(started=True)"
    (tmp_path / "launcher.py").write_text(LAUNCHER + shows)
    words = ["2", f"--run-dir={run_dir}", "--dataset=mnist-5k"]
    done = call(project_root, tmp_path, *words, bash=f'exec "$@" {closed}')
    assert done.returncode == 0, done
    assert (run_dir / "notes.jsonl").exists()
    assert (done.stdout, done.stderr) == ("", "")
    assert b"out" not in (run_dir / "log" / "launcher.log").read_bytes()


# --- the shell scripts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(path.stem for path in (REPOSITORY / "scripts").glob("run_*.sh")))
def test_cdpath_leads_no_launch_script_elsewhere(tmp_path: Path, script: str) -> None:
    """cd searches the folders of CDPATH first, and prints the folder that it finds."""
    (tmp_path / "scripts").mkdir()
    words = ["2", *(["all"] if "lab" in script else []), "--dry-run"]
    done = cdpath(tmp_path, f"scripts/{script}.sh", *words, PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(REPOSITORY / "apps") in done.stdout


def test_cdpath_leads_no_other_script_elsewhere(tmp_path: Path) -> None:
    assert cdpath(tmp_path, "scripts/new_app.sh", "--help").stdout.startswith("usage: bash scripts/new_app.sh")
    (tmp_path / "project" / "scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts" / "verify_horovod.sh", tmp_path / "project" / "scripts")
    error = one_error(cdpath(tmp_path, "scripts/verify_horovod.sh", folder=tmp_path / "project"))
    assert f"error: {tmp_path}/project/.venvs/mnist_horovod/bin/python is not" in error
    lines = cdpath(tmp_path, "docs/diff_sizes.sh").stdout.splitlines()
    assert lines
    assert all(re.fullmatch(r"\w+/\w+\.py: \d+ changed lines of \d+", line) for line in lines)


def cdpath(other: Path, *words: str, folder: Path = REPOSITORY, **environ: str) -> Done:
    return subprocess.run(
        ["bash", *words],
        cwd=folder,
        env=environment(CDPATH=f"{other}:{folder}", **environ),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_the_verification_of_horovod_needs_a_python() -> None:
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "verify_horovod.sh")],
        env=environment(PYTHON="/bin/true"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "/bin/true is not a Python" in one_error(done)
