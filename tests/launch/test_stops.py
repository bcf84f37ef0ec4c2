"""Test stops at bad moments: repeated signals, a console that nobody reads, a start without resources."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from processes import is_running
from repository import PACKAGES, REPOSITORY
from scratch_project import LIMIT, RANKS, ScratchProject, end_of, environment, wait_for

SOURCES = os.pathsep.join(str(REPOSITORY / folder) for folder in PACKAGES)
WAIT = "note()\nsys.exit(max(each.wait() for each in ranks))"


def fill_console(process: subprocess.Popen[str]) -> None:
    """Fill the pipe of a process's standard error, so that each write to the pipe blocks until the test reads."""
    pipe = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"." * size)
    os.close(pipe)


def saved(project: ScratchProject) -> list[int]:
    return sorted(note["saved"] for note in project.notes() if "saved" in note)


def end_unread(process: subprocess.Popen[str]) -> int:
    """Return the exit code of a process whose console nobody reads."""
    try:
        return process.wait(timeout=LIMIT)
    finally:
        process.kill()
        for stream in (process.stdout, process.stderr):  # processes of the job may keep the pipes open
            if stream:
                stream.close()


# --- repeated signals ------------------------------------------------------------------------------------------------

# The handler prints each number for which it raises Stopped. The thread receives signals that the main thread blocks.
REPEATS = """
import os, signal, threading, time
from samestep_launch import supervise

def send(number, when):
    try:
        os.kill(os.getpid(), number)
        time.sleep(0)
    except supervise.Stopped as stopped:
        print(when, stopped.number)

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
for number in supervise.HANDLED:  # a shell's background jobs ignore SIGINT
    signal.signal(number, signal.SIG_DFL)
supervise.stop_on_signals()
supervise.REPEATED = 600.0  # this process may be slow
send(signal.SIGTERM, "first")
send(signal.SIGTERM, "repeated")
send(signal.SIGUSR1, "repeated")
send(signal.SIGINT, "repeated")
try:
    with supervise.block_signals(), supervise.block_signals():
        send(signal.SIGINT, "blocked")
        print("not stopped")
except supervise.Stopped as stopped:
    print("delayed", stopped.number)
supervise.REPEATED = 0.0
time.sleep(0.01)
send(signal.SIGTERM, "later")
"""


def test_only_ctrl_c_is_repeated_and_a_blocked_signal_arrives_later() -> None:
    environ = environment(PYTHONPATH=SOURCES)
    done = subprocess.run(
        [sys.executable, "-c", REPEATS], env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["first 15", "repeated 2", "not stopped", "delayed 2", "later 15"]


# --- a console that nobody reads -----------------------------------------------------------------------------------


def test_ranks_save_at_a_signal_while_nobody_reads_the_console(project: ScratchProject) -> None:
    """The second TERM comes within a second after the first, and is ignored."""
    process = project.start(RANKS + WAIT)
    wait_for(project.notes)
    fill_console(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert end_unread(process) == 143
    assert saved(project) == [0, 1]


def test_ranks_save_at_a_notice_while_nobody_reads_the_console(project: ScratchProject) -> None:
    notice = project.work / "notice"
    process = project.start(RANKS + WAIT, "2", f"--preemption-notice=file:{notice}")
    wait_for(project.notes)
    fill_console(process)
    notice.touch()
    assert end_unread(process) == 143
    assert saved(project) == [0, 1]


def test_a_job_restarts_while_nobody_reads_the_console(project: ScratchProject) -> None:
    code = """
heartbeat(1)
note(attempt=attempt)
while not (run_dir / "go").exists(): time.sleep(0.02)
sys.exit(1 - attempt)
"""
    process = project.start(code)
    wait_for(project.notes)
    fill_console(process)
    (project.run_dir / "go").touch()
    wait_for(lambda: len(project.notes()) == 2)
    done = end_of(process)
    assert done.returncode == 0
    assert "starting it again (1 of 3)" in done.stderr


# LOUD writes 100 KB of messages, more than a pipe holds, and succeeds.
LOUD = """
note(pid=os.getpid())
for number in range(2000):
    print(f"warning: {number:040}", file=sys.stderr)
"""


def pausing_reader(project: ScratchProject) -> subprocess.Popen[str]:
    """Start a job with LOUD, and return its launch script some time after the end of the job's processes."""
    process = project.start(LOUD)
    pid = wait_for(project.notes)[0]["pid"]
    wait_for(lambda: not is_running(pid))
    time.sleep(1.5)  # five times OUTPUT_SECONDS of the scratch project
    return process


def test_the_console_gets_all_output_after_its_reader_paused(project: ScratchProject) -> None:
    done = end_of(pausing_reader(project))
    assert done.returncode == 0
    assert [int(line.split()[1]) for line in done.stderr.splitlines()] == [*range(2000)]


def test_a_signal_ends_the_wait_for_the_consoles_reader(project: ScratchProject) -> None:
    process = pausing_reader(project)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end_unread(process) == 143


# --- a start at a bad moment ---------------------------------------------------------------------------------------

# FULL runs in the launch script, and refuses to start the launcher.
FULL = """
import subprocess, sys

def start(self, *arguments, **settings):
    if settings.get("start_new_session") and sys.argv[0].endswith("/launch.py"):
        raise OSError({number}, {text!r})
    original(self, *arguments, **settings)

original, subprocess.Popen.__init__ = subprocess.Popen.__init__, start
"""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN])
def test_a_launcher_that_cannot_start_is_one_line(project: ScratchProject, number: int) -> None:
    folder = project.work / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FULL.format(number=number, text=os.strerror(number)))
    done = end_of(project.start("", environ={"PYTHONPATH": str(folder)}))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: cannot start {sys.executable}: {os.strerror(number)}: ")


# EARLY sends Ctrl-C when the program imports a module.
EARLY = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "samestep_launch.supervise":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("command", [["launch.py", "toy", "{python}", "--", "2"], ["samestep", "run", "program.py"]])
def test_ctrl_c_during_the_imports_prints_no_traceback(project: ScratchProject, command: list[str]) -> None:
    folder = project.work / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(EARLY)
    name, *words = command
    program = ["-m", name] if name == "samestep" else [str(project.root / "scripts" / name)]
    done = subprocess.run(
        [sys.executable, *program, *words],
        env=environment(PYTHONPATH=os.pathsep.join([str(folder), SOURCES])),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
