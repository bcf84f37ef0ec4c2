"""Test that the watchdog ends a rank without progress and names the stuck rank. The ranks are processes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import samestep
from processes import wait_for
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.recovery import watchdog
from samestep.recovery.rank_files import stacks

CORE = str(Path(samestep.__file__).parents[1])
LIMIT = 15.0  # seconds; every wait ends sooner
HOST = socket.gethostname()

# RANK runs one of 'world' ranks. It beats once for each step to 'steps', then beats for 'beats' seconds, and then, if
# 'waits' is true, waits as in a collective.
RANK = """
import json, sys, time
from argparse import Namespace
from pathlib import Path
from samestep import log
from samestep.env import World
from samestep.recovery import watchdog

its = json.loads(sys.argv[1])
run_dir = Path(its["run_dir"])
watchdog._TICK, watchdog._SILENT = its["tick"], its["silent"]
log.start(run_dir, its["rank"], False)
world = World(its["rank"], its["world"], launcher=its["launcher"])
dog = watchdog.Watchdog()
dog.start(world, Namespace(timeout=its["timeout"], first_step_timeout=its["first_step_timeout"]))
dog.write_to(run_dir / "log")
if its["restored"]:
    dog.resume_at(its["restored"])
time.sleep(its["compiles"])
for step in range(its["restored"], its["steps"]):
    dog.beat(step + 1)
if its["evaluation_compiles"]:
    dog.expect_compilation()
    time.sleep(its["evaluation_compiles"])
    dog.beat()
if its["stops"]:
    dog.stop()
    time.sleep(its["stops"])
end = time.monotonic() + its["beats"]
while time.monotonic() < end:
    dog.beat()
    time.sleep(0.05)
if its["waits"]:
    time.sleep(600)
(run_dir / "done").write_text("")
"""
WAITS = next(i for i, line in enumerate(RANK.splitlines(), 1) if "sleep(600)" in line)
STANDS = f"is at <string>:{WAITS} in <module>"
# LAUNCHER starts a rank and waits for it, as a launcher does.
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
"""


class Job:
    """Start ranks that share a run dir, and kill them at the end of the test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._processes: list[subprocess.Popen[str]] = []

    def environment(self, **changes: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
        return {**inherited, "PYTHONPATH": CORE, **JobInfo(job="this").to_environ(), **changes}

    def rank_command(self, **changes: Any) -> list[str]:
        settings = {
            "rank": 0,
            "world": 1,
            "launcher": "torchrun",
            "timeout": 0.5,
            "steps": 0,
            "beats": 0.0,
            "waits": True,
        }
        settings |= {"first_step_timeout": None, "compiles": 0.0, "evaluation_compiles": 0.0}
        settings |= {"restored": 0, "stops": 0.0, "tick": 0.1, "silent": 1.0, "run_dir": str(self.run_dir), **changes}
        return ["-c", RANK, json.dumps(settings)]

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that killpg also kills child processes
        )
        self._processes.append(process)
        return process

    def rank(self, environment: dict[str, str] | None = None, **changes: Any) -> subprocess.Popen[str]:
        """Start a rank, and return its process when its first heartbeat is written."""
        process = self.start(self.rank_command(**changes), **(environment or {}))
        self.alive(changes.get("rank", 0), lambda seen: seen["pid"] == process.pid)
        return process

    def alive(self, rank: int, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until a rank's heartbeat meets the condition, and return the heartbeat's values."""
        path = self.run_dir / "log" / f"alive-{rank}"

        def seen() -> dict[str, Any] | None:
            with contextlib.suppress(FileNotFoundError):
                values: dict[str, Any] = json.loads(path.read_text())
                if condition(values):
                    return values
                return None
            return None

        found: dict[str, Any] = wait_for(seen, LIMIT)
        return found

    def clean_up(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT)


def ended(process: subprocess.Popen[str]) -> str:
    """Return the error line of a rank that the watchdog ended, without the advice to run ``samestep hang``."""
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (1, ""), err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    line, command, run_dir = line.partition("; samestep hang ")
    assert bool(command) == ("no progress" in line)
    assert run_dir.endswith(" shows all stacks" if command else "")
    return line


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.clean_up()


# --- progress ----------------------------------------------------------------------------------------------------


def test_a_rank_without_progress_ends_and_says_so(job: Job) -> None:
    process = job.rank(steps=7)
    assert ended(process) == (
        f"error: no progress for 0.5 s: rank 0 ({HOST}, pid {process.pid}) last alive at step 7 {STANDS}"
    )
    assert "no progress for 0.5 s" in (job.run_dir / "log" / "rank-0.log").read_text()


def test_beats_keep_a_rank_alive(job: Job) -> None:
    process = job.rank(beats=2.5, timeout=1.0, waits=False)
    assert process.communicate(timeout=LIMIT) == ("", "")
    assert process.returncode == 0


def test_until_its_first_step_is_compiled_a_rank_has_longer(job: Job) -> None:
    """--first-step-timeout applies to the first step and the first evaluation only."""
    process = job.rank(restored=7, steps=9, first_step_timeout=LIMIT, compiles=1.5, evaluation_compiles=1.5)
    line = f"error: no progress for 0.5 s: rank 0 ({HOST}, pid {process.pid}) last alive at step 9"
    assert ended(process) == f"{line} {STANDS}"
    assert job.alive(0, lambda seen: seen["updates"] == 2)


@pytest.mark.parametrize("which", ["compiles", "evaluation_compiles"])
def test_the_error_of_a_rank_that_compiles_for_too_long_names_the_option(job: Job, which: str) -> None:
    process = job.rank(None, steps=3, timeout=LIMIT, first_step_timeout=1.0, **{which: LIMIT})
    line = ended(process)
    assert line.startswith(f"error: no progress for 1 s: rank 0 ({HOST}, pid {process.pid}) last alive at step ")
    assert line.endswith("; if it was still compiling, give it a longer --first-step-timeout")


def test_a_heartbeat_names_its_process_and_repeats_during_a_hang(job: Job) -> None:
    process = job.rank(steps=5, timeout=LIMIT)
    first = job.alive(0, lambda seen: seen["step"] == 5)
    assert (first["rank"], first["pid"], first["host"], first["job"]) == (0, process.pid, HOST, "this")
    assert abs(first["time"] - time.time()) < LIMIT
    job.alive(0, lambda seen: seen["time"] > first["time"])  # written while the rank hangs


def test_a_heartbeat_during_a_garbage_collection_does_not_hang_the_process() -> None:
    """In Python 3.11.7, `sys._current_frames` deadlocks if a finalizer releases the GIL to another thread."""
    program = """
import gc, os, threading
from samestep.recovery.rank_files import stacks

class Cycle:
    def __init__(self):
        self.itself, self.file = self, open(os.devnull)  # to close it gives up the interpreter's lock

def beat():
    for _ in range(500):
        stacks()
        Cycle()
        threading.Thread(target=Cycle).start()  # which takes the lock of all threads' states

gc.set_threshold(50)
threads = [threading.Thread(target=beat) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
"""
    environment = {**os.environ, "PYTHONPATH": CORE}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, timeout=60, check=True)


def test_no_garbage_is_collected_while_the_frames_of_a_thread_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may release the GIL, and the thread then frees a frame that the heartbeat's thread reads."""
    walk = traceback.walk_stack
    collects = []

    def watched(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        for each in walk(frame):
            collects.append(gc.isenabled())
            yield each

    monkeypatch.setattr(traceback, "walk_stack", watched)
    main = threading.main_thread().ident or 0
    calls = stacks(main)[main]
    assert len(calls) == len(collects) > 0
    assert not any(collects)
    assert gc.isenabled()


def test_no_local_variable_lives_longer_because_its_thread_was_read() -> None:
    """A heartbeat reads the main thread during a forward pass, whose activations must not outlive this pass."""

    class Activation:
        pass

    def forward() -> weakref.ref[Activation]:
        activation = Activation()
        heartbeat = threading.Thread(target=stacks)
        heartbeat.start()
        heartbeat.join()
        return weakref.ref(activation)

    gc.disable()
    try:
        assert forward()() is None
    finally:
        gc.enable()


FAILS_ONCE = """
values = watchdog.Watchdog.values
calls = []
def fail_once(dog):
    calls.append(1)
    if len(calls) == 2:
        raise AttributeError("a frame that is gone")
    return values(dog)
watchdog.Watchdog.values = fail_once
"""


def test_a_heartbeat_that_fails_is_followed_by_others(job: Job) -> None:
    """Without heartbeats, the launch script would end a healthy job."""
    option, code, settings = job.rank_command(timeout=LIMIT)
    job.start([option, code.replace("dog = ", f"{FAILS_ONCE}dog = ", 1), settings])
    first = job.alive(0, lambda seen: True)
    for _ in range(3):
        first = job.alive(0, lambda seen: seen["time"] > first["time"])  # noqa: B023


def test_the_first_update_of_a_process_writes_its_heartbeat_at_once(job: Job) -> None:
    """The launch script reads from heartbeats whether a failed start made an update."""
    job.rank(restored=7, steps=8, tick=LIMIT, timeout=LIMIT)  # no tick during the test
    assert job.alive(0, lambda seen: seen["updates"] == 1)["step"] == 8


def test_later_updates_are_left_to_the_ticks(job: Job) -> None:
    """Only the first update writes a heartbeat at once, because a file per update would slow down short updates."""
    job.rank(steps=9, tick=LIMIT, timeout=LIMIT, beats=0.5)
    assert job.alive(0, lambda seen: seen["updates"] > 0)["step"] == 1


def test_a_restored_rank_is_at_its_checkpoints_step_and_has_made_no_update(job: Job) -> None:
    process = job.rank(restored=7, timeout=1.5)
    assert job.alive(0, lambda seen: seen["step"] == 7)["updates"] == 0
    assert ended(process).endswith(f"rank 0 ({HOST}, pid {process.pid}) last alive at step 7 {STANDS}")


def test_a_rank_that_the_watchdog_ends_leaves_who_was_to_blame_for_the_launch_script(job: Job) -> None:
    process = job.rank(steps=7)
    line = ended(process)
    stalled = json.loads((job.run_dir / "log" / "stalled").read_text())
    assert stalled["rank"] == 0
    assert line == f"error: no progress for 0.5 s: {stalled['culprit']}"
    assert not list((job.run_dir / "log").glob(".*")), "a half-written file is left"


def test_a_watchdog_that_is_stopped_ends_nothing(job: Job) -> None:
    process = job.rank(steps=3, stops=1.5, waits=False)
    assert process.communicate(timeout=LIMIT) == ("", "")
    assert process.returncode == 0
    assert not (job.run_dir / "log" / "stalled").exists()


def test_no_stacks_are_written_after_a_stop_during_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C thread that writes stacks reads frames, which an ending program may free."""
    calls: list[str] = []
    dog = watchdog.Watchdog()

    def stop_and_arm(*arguments: Any, **options: Any) -> None:
        dog.stop()
        calls.append("armed")

    monkeypatch.setattr(faulthandler, "enable", lambda file: None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", stop_and_arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("canceled"))
    (tmp_path / "log").mkdir()
    dog._world = World(0, 1)
    dog.write_to(tmp_path / "log")
    assert calls == ["canceled", "armed", "canceled"]


def test_a_rank_without_a_limit_writes_its_heartbeat(tmp_path: Path) -> None:
    """A program may set no limit, but faulthandler accepts only finite times."""
    (tmp_path / "log").mkdir()
    dog = watchdog.Watchdog()
    dog._world = World(0, 1)
    dog.write_to(tmp_path / "log")
    dog.stop()
    assert json.loads((tmp_path / "log" / "alive-0").read_text())["rank"] == 0


def test_a_stopped_rank_is_named_by_the_others(job: Job) -> None:
    sibling = job.rank(rank=1, world=2, steps=9, timeout=LIMIT)
    job.alive(1, lambda seen: seen["step"] == 9)
    sibling.send_signal(signal.SIGSTOP)
    line = ended(job.rank(rank=0, world=2, steps=4, timeout=2.0))  # rank 0 is at a lower step
    assert f"no progress for 2 s: rank 1 ({HOST}, pid {sibling.pid}) last alive at step 9, silent for" in line


def test_a_dead_rank_is_named_by_the_others(job: Job) -> None:
    sibling = job.rank(rank=1, world=2, steps=9, timeout=LIMIT)
    job.alive(1, lambda seen: seen["step"] == 9)
    sibling.kill()
    line = ended(job.rank(rank=0, world=2, steps=9, timeout=2.0))
    assert f"rank 1 ({HOST}, pid {sibling.pid}) last alive at step 9, silent for" in line


def test_where_all_are_alive_the_rank_with_the_fewest_steps_is_named(job: Job) -> None:
    stuck = job.rank(rank=2, world=3, steps=4, beats=LIMIT, timeout=LIMIT)
    job.rank(rank=1, world=3, steps=5, beats=LIMIT, timeout=LIMIT)
    job.alive(2, lambda seen: seen["step"] == 4)
    job.alive(1, lambda seen: seen["step"] == 5)
    line = ended(job.rank(rank=0, world=3, steps=5))
    assert line.startswith(f"error: no progress for 0.5 s: rank 2 ({HOST}, pid {stuck.pid}) last alive at step 4")


def test_ranks_that_never_came_are_counted(job: Job) -> None:
    line = ended(job.rank(rank=0, world=3, steps=2))
    assert line.endswith(f"last alive at step 2 {STANDS}; 2 of 3 ranks never seen from here: 1-2")


def test_heartbeats_of_another_job_do_not_count(job: Job) -> None:
    """A restarted job finds the heartbeats of ranks of earlier starts."""
    job.rank(rank=1, world=2, timeout=LIMIT, environment=JobInfo(job="earlier").to_environ())
    process = job.rank(rank=0, world=2, steps=6)
    assert ended(process).endswith(
        f"rank 0 ({HOST}, pid {process.pid}) last alive at step 6 {STANDS}; 1 of 2 ranks never seen from here: 1"
    )


def test_heartbeats_that_a_crash_left_damaged_stop_no_watchdog(job: Job) -> None:
    damaged = [b"", bytes(100), b"\xff\xfe", b"{", b"{}", b"[]", b"null", b"7", b'{"job": "this"}']
    (job.run_dir / "log").mkdir()
    for rank, content in enumerate(damaged, start=1):
        (job.run_dir / "log" / f"alive-{rank}").write_bytes(content)
    line = ended(job.rank(rank=0, world=1 + len(damaged)))
    assert "no progress for 0.5 s: rank 0" in line
    assert f"{len(damaged)} of {1 + len(damaged)} ranks never seen" in line


def test_a_rank_whose_log_folder_is_gone_ends_too(job: Job) -> None:
    """Without the log folder, not even the rank's own heartbeat can be read."""
    process = job.rank(timeout=1.0)
    folder = job.run_dir / "log"
    folder.rename(folder.with_name("elsewhere"))
    assert "no progress for 1 s" in ended(process)


def test_a_rank_that_was_stopped_and_continues_gets_a_new_chance(job: Job) -> None:
    process = job.rank(beats=3.0, timeout=1.0, waits=False)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=LIMIT) == ("", "")
    assert process.returncode == 0


# --- launchers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def launch_script() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def under(launch_script: subprocess.Popen[bytes]) -> dict[str, str]:
    """Return the environment variables of a job that this launch script started."""
    return JobInfo(job="this", launcher=f"{launch_script.pid}@{socket.gethostname()}").to_environ()


@pytest.mark.parametrize(("launcher", "reaped"), [("torchrun", True), ("none", False)])
def test_a_rank_ends_with_its_launch_script(
    job: Job, launch_script: subprocess.Popen[bytes], launcher: str, reaped: bool
) -> None:
    process = job.rank(
        launcher=launcher,
        beats=LIMIT,
        timeout=LIMIT,
        environment=under(launch_script),
    )
    launch_script.kill()  # the killed process is a zombie until its parent waits for it
    if reaped:
        launch_script.wait(timeout=LIMIT)
    assert ended(process) == f"error: rank 0: its launcher (pid {launch_script.pid}) is gone; ending"


def test_a_rank_ends_with_its_launch_script_at_the_real_pace(job: Job, launch_script: subprocess.Popen[bytes]) -> None:
    settings = {"tick": watchdog._TICK, "silent": watchdog._SILENT, "beats": LIMIT, "timeout": LIMIT}
    process = job.rank(environment=under(launch_script), **settings)
    launch_script.kill()
    assert "is gone" in ended(process)


def test_a_rank_whose_launch_script_is_gone_before_it_starts_ends(
    job: Job, launch_script: subprocess.Popen[bytes]
) -> None:
    """Importing a framework takes seconds, in which a launch script may be killed."""
    launch_script.kill()
    launch_script.wait(timeout=LIMIT)
    command = job.rank_command(beats=3.0, timeout=LIMIT, waits=False)
    assert "is gone" in ended(job.start(command, **under(launch_script)))


def test_a_rank_ends_with_the_launcher_that_started_it(job: Job) -> None:
    launcher = job.start(["-c", LAUNCHER, *job.rank_command(beats=LIMIT, timeout=LIMIT)])
    job.alive(0, lambda seen: True)
    launcher.kill()
    assert launcher.stderr is not None
    assert launcher.stderr.read() == f"error: rank 0: its launcher (pid {launcher.pid}) is gone; ending\n"
    assert not (job.run_dir / "done").exists()


@pytest.mark.parametrize("launcher", ["none", "env"])
def test_a_rank_started_by_hand_outlives_its_shell(job: Job, launcher: str) -> None:
    shell = job.start(["-c", LAUNCHER, *job.rank_command(launcher=launcher, beats=2.0, timeout=LIMIT, waits=False)])
    job.alive(0, lambda seen: True)
    shell.kill()
    assert shell.stderr is not None
    assert shell.stderr.read() == ""  # stderr closes when the rank ends
    assert (job.run_dir / "done").exists()
