"""Test that a blocked start or stopped ranks cause one error line, and that no job hangs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attempts import Attempt, check
from samestep import NonRetryableError, events, untrusted
from samestep_launch import job, supervise, user_folder
from scratch_project import LIMIT, ScratchProject, end_of, wait_for

# RANK defines ``watched``, which starts a rank with core's watchdog, and ``alive``, which waits for a rank's heartbeat
# at a step and returns the rank's process ID.
RANK = """
code = '''
import os, sys, time
from pathlib import Path
from samestep import env, log
from samestep.options import Options
from samestep.recovery import watchdog
log.start(Path(sys.argv[1]), int(os.environ["RANK"]), False)
dog = watchdog.Watchdog()
dog.start(env.detect(os.environ), Options(timeout=1.0, straggler=0.0))
dog.write_to(Path(sys.argv[1], "log"))
while True:
    dog.beat({step})
    time.sleep(0.1)
'''
def watched(rank, step):
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen([sys.executable, "-c", code.format(step=step), str(run_dir)], env=environ)
def alive(rank, step):
    while True:
        try:
            beat = json.loads((run_dir / "log" / f"alive-{rank}").read_text())
            if beat["job"] == job_info["job"] and beat["step"] == step:
                return beat["pid"]
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
def end():
    ranks[0].kill(), ranks[0].wait()
    time.sleep(4 if "--timeout=1" in options else 0)
    (run_dir / "log" / "stack-0.txt").unlink()  # as a rank that ends well
note(started=True)
"""


def events_of(project: ScratchProject, kind: str) -> list[dict[str, object]]:
    lines = (project.run_dir / "log" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


# --- ranks that are stopped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_when_all_ranks_are_stopped_the_launch_script_names_one_and_restarts(
    project: ScratchProject, ranks: int
) -> None:
    """The watchdog of a stopped rank is stopped as well, so only the launch script can report the rank."""
    launcher = f"""
if attempt == 0:
    ranks = [watched(each, 3) for each in range({ranks})]
    for pid in [alive(each, 3) for each in range({ranks})]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(600)
"""
    done = project.run(RANK + launcher, str(ranks), "--timeout=1")
    assert (done.returncode, len(project.notes())) == (0, 2), done.stderr
    error, warning = done.stderr.splitlines()
    place = rf"rank \d \({socket.gethostname()}, pid \d+\) has written no heartbeat for \d+ s, last alive at step 3: "
    assert re.match(f"error: {place}", error), error
    assert "ended with code -9; starting it again" in warning
    (event,) = events_of(project, events.HANG)
    assert (event["source"], event["step"]) == ("launcher", 3)


def test_a_launch_script_that_was_stopped_itself_gives_ranks_a_new_period(project: ScratchProject) -> None:
    """A machine that sleeps stops and continues all processes at the same time."""
    code = (
        "ranks = [watched(0, 3)]\nnote(pid=alive(0, 3))\nwhile not (run_dir / 'go').exists(): time.sleep(0.02)\nend()"
    )
    process = project.start(RANK + code, "1", "--timeout=3")
    wait_for(lambda: len(project.notes()) == 2)
    pid = project.notes()[1]["pid"]
    for each, number in ((pid, signal.SIGSTOP), (process.pid, signal.SIGSTOP)):
        os.kill(each, number)
    time.sleep(6.0)  # more than --timeout and more than PAUSE_SECONDS
    for each, number in ((process.pid, signal.SIGCONT), (pid, signal.SIGCONT)):
        os.kill(each, number)
    time.sleep(1.5)
    (project.run_dir / "go").write_text("")
    done = end_of(process)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_that_has_ended_is_not_taken_for_a_stopped_one(project: ScratchProject) -> None:
    code = "ranks = [watched(0, 3)]\nalive(0, 3)\nend()"
    done = project.run(RANK + code, "1", "--timeout=1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_heartbeat_that_cannot_be_written_still_changes_its_file(tmp_path: Path) -> None:
    """The launch script must not report a rank as stopped if the disk is full, for example."""
    path = tmp_path / "alive-0"
    path.write_text("{}")
    (tmp_path / ".alive-0.0.tmp").mkdir()
    os.utime(path, (1, 1))
    untrusted.write_json(tmp_path, "alive-0", {}, 0)
    assert path.stat().st_mtime > 1


def test_a_launcher_that_brings_no_rank_to_life_is_a_failed_start(project: ScratchProject) -> None:
    done = project.run("note(started=True)\ntime.sleep(600)", "1", "--timeout=1")
    assert (done.returncode, len(project.notes())) == (1, 2)
    lines = done.stderr.splitlines()
    assert [line for line in lines if "no rank has written a heartbeat within" in line] == lines[::2][:2]
    assert lines[-1].startswith("error: the job failed twice before its first step")


# --- what is in the way in the log folder --------------------------------------------------------------------------

MAKE: dict[str, Callable[[Path], None]] = {
    "directory": Path.mkdir,
    "FIFO": os.mkfifo,
    "link": lambda path: path.symlink_to("/dev/full"),
}
IN_THE_WAY = [("launcher.log", kind) for kind in MAKE]
IN_THE_WAY += [("stalled", "directory"), ("no-restart", "directory"), ("stack-0.txt", "directory")]
IN_THE_WAY += [("alive-0", "FIFO"), ("events.jsonl", "FIFO"), ("rank-1.log", "link")]


def in_the_way(name: str, kind: str) -> Callable[[ScratchProject], dict[str, str]]:
    def prepare(project: ScratchProject) -> dict[str, str]:
        (project.run_dir / "log").mkdir(parents=True)
        MAKE[kind](project.run_dir / "log" / name)
        return {}

    return prepare


ATTEMPTS = [
    Attempt(17, f"{name} a {kind}", 2, rf"log/{name}\b.*: \w+", prepare=in_the_way(name, kind))
    for name, kind in IN_THE_WAY
]
PLANT = """
logs = run_dir / "log"
note(started=True)
if attempt == 0:
    for name in ("stalled", "no-restart", "stack-0.txt"):
        (logs / name).mkdir()
    os.mkfifo(logs / "alive-0")
    os.mkfifo(logs / "events.jsonl")
    (logs / "alive-1").write_text(json.dumps({"job": job_info["job"], "updates": "many", "pid": [1]}))
    time.sleep(1.5)
    sys.exit(7)
"""
LOST = "error: rank 1: RuntimeError: [/pytorch/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:42; more in x"
ATTEMPTS += [
    Attempt(17, "things made during the job", 0, warning="code 7; starting it again", launcher=PLANT, starts=2),
    Attempt(
        20,
        "a lost connection after the reason",
        0,
        "^error: the reason$",
        launcher=f"note(started=True)\nfor line in ('error: the reason', {LOST!r}): print(line, file=sys.stderr)",
        starts=1,
    ),
    Attempt(
        20,
        "a lost connection as the only reason",
        0,
        "Connection closed by peer",
        launcher=f"note(started=True)\nfor rank in '12': print({LOST!r}.replace('1', rank, 1), file=sys.stderr)",
        starts=1,
    ),
    Attempt(
        22,
        "no threads",
        0,
        launcher="note(started=True)\nassert int(os.environ['OMP_NUM_THREADS']) > 0",
        environ={"OMP_NUM_THREADS": ""},
        starts=1,
    ),
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=str)
def test_an_attempt_ends_as_the_table_says(project: ScratchProject, attempt: Attempt) -> None:
    check(project, attempt)


WRONG: dict[str, list[object]] = {
    "pid": ["1", [1], {}, None, -1, 1.5, True],
    "host": [5, ["a"], None, "x" * 300],
    **{name: ["1", [], None, -1, 1e3] for name in ("rank", "step", "updates")},
}
CONTENTS = [{name: value} for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("content", CONTENTS, ids=str)
def test_a_heartbeat_with_a_wrong_type_is_left_out(tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "alive-0").write_text(json.dumps({"job": "x", **content}))
    (tmp_path / "alive-1").write_text(json.dumps({"job": "x", "rank": 1}))
    assert [beat["rank"] for beat in supervise.heartbeats("x", tmp_path)] == [1]


@pytest.mark.parametrize("code", [[2], "2", 2.0, True, None, 0, -9, 256, {}])
def test_a_verdict_with_a_wrong_type_is_none(tmp_path: Path, code: object) -> None:
    (tmp_path / "no-restart").write_text(json.dumps({"code": code, "job": "x"}))
    assert job._verdict(tmp_path, "x") is None


# --- this user's folder --------------------------------------------------------------------------------------------


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that replaces /tmp, with a short name, because the names of Unix sockets are limited."""
    user_folder._warn_once.cache_clear()
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(user_folder, "BASE", Path(name))
        yield Path(name)


def taken(base: Path, what: str) -> None:
    """Block the user's folder or its lock file, as ``what`` describes."""
    folder = base / f"samestep-{os.getuid()}"
    if what == "file":
        folder.touch()
    elif what == "link":
        (base / "elsewhere").mkdir()
        folder.symlink_to(base / "elsewhere")
    else:
        folder.mkdir()
        MAKE[what.partition(" ")[0]](folder / "ports.lock")


@pytest.mark.parametrize(
    "what", ["file", "link", "FIFO of locks", "link of locks", "directory of locks", "another user's"]
)
def test_without_a_folder_of_the_users_own_ports_are_chosen_without_locks(
    base: Path, what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if what == "another user's":
        (base / "samestep-12345").mkdir()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    else:
        taken(base, what)
    for _ in range(2):
        with user_folder.reserved_port(None) as port:
            assert port in user_folder.PORTS
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith(f"warning: cannot use {base}/samestep-")
    assert not [path for path in base.rglob("*") if path.is_file() and path.name != f"samestep-{os.getuid()}"]


def test_without_locks_in_the_file_system_a_port_is_chosen_with_one_warning(
    base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "injected")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    user_folder._warn_of_no_locks.cache_clear()
    for _ in range(2):
        with user_folder.reserved_port(None) as port:
            assert port in user_folder.PORTS
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning == (
        f"warning: the file system of {base} has no locks, simultaneous jobs may choose the same port: "
        "set MASTER_PORT for each"
    )


def test_the_users_folder_is_closed_to_others(base: Path) -> None:
    (base / f"samestep-{os.getuid()}").mkdir(mode=0o777)
    with user_folder.reserved_port(None):
        folder = user_folder.user_folder(base)
        assert folder is not None
        assert oct(folder.stat().st_mode)[-3:] == "700"
        assert oct((folder / "ports.lock").stat().st_mode)[-3:] == "600"


HOLD = "import fcntl, sys; file = open(sys.argv[1]); fcntl.lockf(file, fcntl.LOCK_SH); print(1, flush=True); input()"


def test_a_lock_on_all_ports_is_an_error_and_no_endless_loop(base: Path) -> None:
    folder = user_folder.user_folder(base)
    assert folder is not None
    (folder / "ports.lock").touch()
    command = [sys.executable, "-S", "-c", HOLD, str(folder / "ports.lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(NonRetryableError, match="no port is free: "), user_folder.reserved_port(None):
            pass
    finally:
        holder.communicate(b"\n", timeout=LIMIT)


# --- the job's TMPDIR ----------------------------------------------------------------------------------------------

LEAVE = """
folder = Path(os.environ["TMPDIR"])
(folder / "torchelastic_x").mkdir()
note(started=True, folder=str(folder), left=[path.name for path in folder.parent.iterdir()])
"""


def test_what_a_job_leaves_in_its_tmpdir_goes_with_it(project: ScratchProject, base: Path) -> None:
    code = LEAVE + "if attempt == 0: os.kill(os.getpid(), signal.SIGKILL)"
    assert project.run(code, environ={"TMPDIR": str(base)}).returncode == 0
    parent = base / f"samestep-{os.getuid()}"
    folders = {Path(note["folder"]) for note in project.notes()}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {parent}
    assert list(parent.iterdir()) == []


def test_the_tmpdir_of_a_killed_launch_script_is_removed_by_the_next_and_no_others(
    project: ScratchProject, base: Path
) -> None:
    environ = {"TMPDIR": str(base)}
    waits = LEAVE + "while not (run_dir / 'go').exists(): time.sleep(0.02)"
    process = project.start(waits, environ=environ)
    (living,) = wait_for(project.notes)
    other = ScratchProject(project.root, project.work / "other")
    other.mark = project.mark
    killed = other.start(waits, environ=environ)
    wait_for(other.notes)
    killed.kill()
    for pid in other.processes():  # processes of both scripts have this mark
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process may end meanwhile
            if os.path.samefile(f"/proc/{pid}/cwd", other.work):
                os.kill(pid, signal.SIGKILL)
    killed.communicate(timeout=LIMIT)
    assert other.run(LEAVE, environ=environ).returncode == 0
    dead, third = other.notes()
    assert Path(dead["folder"]).name not in third["left"]
    assert Path(living["folder"]).name in third["left"]
    (project.run_dir / "go").write_text("")
    assert end_of(process).returncode == 0


@pytest.mark.parametrize("tmpdir", ["/nonexistent", "relative", f"/tmp/{'x' * 90}"])
def test_a_tmpdir_that_cannot_hold_the_jobs_stays(tmpdir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", tmpdir)
    with user_folder.job_tmpdir(is_local=True) as variables:
        assert variables == {}


# --- loopback ------------------------------------------------------------------------------------------------------

# If this user cannot create network namespaces, NO_LOOPBACK makes bind fail as without loopback.
NO_LOOPBACK = """
import socket
class Socket(socket.socket):
    def bind(self, address):
        raise OSError(99, "Cannot assign requested address")
socket.socket = Socket
"""


def test_without_a_loopback_address_there_is_one_line_before_anything_starts(project: ScratchProject) -> None:
    unshare = ["unshare", "--map-root-user", "--net"]
    has_unshare = shutil.which("unshare") and subprocess.run([*unshare, "true"], check=False, timeout=LIMIT).returncode
    environ = {**os.environ, "PYTHON": sys.executable, "SAMESTEP_TEST": project.mark}
    if has_unshare != 0:
        unshare = []
        (project.work / "sitecustomize.py").write_text(NO_LOOPBACK)
        environ["PYTHONPATH"] = str(project.work)
    words = ["toy", "{python}", "-c", "print('started')", "--", "2", f"--run-dir={project.run_dir}"]
    command = [*unshare, "bash", str(project.root / "scripts" / "launch.sh"), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: this machine cannot connect to 127.0.0.1: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_address_that_is_not_this_machines_fails_the_check() -> None:
    user_folder.check_loopback()
    with pytest.raises(NonRetryableError, match=r"192\.0\.2\.1: "):
        user_folder.check_loopback("192.0.2.1")
