"""Test that the diagnosis of a hang names the stuck rank and its line of code. The ranks are processes that hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import samestep
from programs import CORE, LIMIT
from samestep import log, untrusted
from samestep.env import World
from samestep.options import Options
from samestep.recovery import hang_diagnosis, rank_files, watchdog
from samestep_observe import hang_report

HOST = socket.gethostname()

# PROGRAM runs one of two ranks. The guilty rank is stuck in the given function; the other rank waits for it.
PROGRAM = """\
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from typing import Any
from samestep import log
from samestep.env import World
from samestep.options import Options
from samestep.recovery import watchdog
from samestep.root import Root

run_dir, rank, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def stopped():
    time.sleep(1.5) or os.kill(os.getpid(), signal.SIGSTOP)  # stuck: stopped

def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()  # stuck: lock

def loader():
    time.sleep(600)  # stuck: loader

def pipe():
    while True:
        log.info("x" * 1000)  # stuck: pipe

def disk():
    os.mkfifo(run_dir / "hangs")
    (run_dir / "hangs").read_text()  # stuck: disk

def heartbeats():
    os.mkfifo(run_dir / "hangs")
    Root.create = lambda root, name: open(run_dir / "hangs", "wb")  # as on a disk that hangs
    time.sleep(600)  # stuck: heartbeats

def loop():
    while True: pass  # stuck: loop

def interpreter():
    ctypes.PyDLL(None).sleep(600)  # stuck: interpreter

def unexplained():
    sys.modules["samestep.recovery.hang_diagnosis"] = None
    time.sleep(600)  # stuck: unexplained

def wait():
    while True:
        with dog.collective("sum 7"):
            time.sleep(0.1)

log.start(run_dir, rank, False)
dog = watchdog.Watchdog()
dog.start(World(rank, 2, launcher="torchrun"), Options(timeout=float(sys.argv[4])))
dog.write_to(run_dir / "log")
while not (run_dir / "log" / f"alive-{1 - rank}").exists():
    time.sleep(0.05)
for step in range(3):
    dog.beat(step + 1)
globals()[kind]()
"""
KINDS = ("stopped", "lock", "loader", "pipe", "disk", "heartbeats", "loop", "interpreter", "unexplained")
TIMEOUTS = {kind: 6 + i for i, kind in enumerate(KINDS)}  # seconds; different, so that diagnoses run in turn


def place(kind: str) -> str:
    """Return the file, line and function at which PROGRAM is stuck in this kind of hang."""
    lines = PROGRAM.splitlines()
    found = [i for i, line in enumerate(lines, 1) if line.endswith(f"# stuck: {kind}")]
    return f"program.py:{found[0]} in {kind}"


@dataclass
class Hang:
    """The processes and the console output of one hang that has ended."""

    run_dir: Path
    guilty: int
    pids: dict[int, int]
    lines: dict[int, str]  # each rank's console output

    @property
    def seconds(self) -> float:
        """Return the seconds between the last progress of the innocent rank and its error line."""
        return float(untrusted.read_object(self.run_dir / "log" / f"hang-{1 - self.guilty}.json")["waited"])


class Ranks:
    """The processes of the two ranks of one hang."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.run_dir = folder
        self.guilty = 0 if kind == "pipe" else 1
        self.kind = kind
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(PROGRAM)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
        self.processes = {
            rank: subprocess.Popen(
                [
                    sys.executable,
                    program,
                    folder,
                    str(rank),
                    kind if rank == self.guilty else "wait",
                    str(TIMEOUTS[kind]),
                ],
                env={**environ, "PYTHONPATH": CORE, "SAMESTEP_JOB_INFO": json.dumps({"job": f"job-{kind}"})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # no process reads this pipe
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        }

    def ended(self) -> Hang:
        """Wait until both ranks end. Kill the guilty rank if it cannot end without a kill."""
        lines = {}
        pids = {rank: process.pid for rank, process in self.processes.items()}
        for rank, process in sorted(self.processes.items(), key=lambda item: item[0] == self.guilty):
            if rank == self.guilty and self.kind in ("stopped", "interpreter"):
                process.kill()
            assert process.stderr
            lines[rank] = process.stderr.read().replace(f"; samestep hang {self.run_dir} shows all stacks", "")
            process.wait(timeout=LIMIT)
        return Hang(self.run_dir, self.guilty, pids, lines)

    def clean_up(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate(timeout=LIMIT)


@pytest.fixture
def hangs(tmp_path: Path) -> Iterator[dict[str, Hang]]:
    """Run all hangs at the same time, because each hang waits most of the time. Yield the ended hangs by kind."""
    started = {kind: Ranks(tmp_path / kind, kind) for kind in KINDS}
    try:
        yield {kind: ranks.ended() for kind, ranks in started.items()}
    finally:
        for ranks in started.values():
            ranks.clean_up()


@pytest.mark.slow
def test_a_hang_is_reported_with_the_rank_and_its_line(
    hangs: dict[str, Hang], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check all hangs in one test, because they run at the same time."""
    for kind, found in hangs.items():
        check_line(kind, found)
    found = hangs["unexplained"]  # a rank without a diagnosis ends with a short line
    who = f"rank 1 ({HOST}, pid {found.pids[1]}) last alive at step 3"
    assert found.lines[1] == f"error: no progress for {TIMEOUTS['unexplained']} s: {who}\n"
    check_hang_report(hangs, capsys)
    check_lone_hang_report(hangs["interpreter"], tmp_path / "lone", capsys)


def check_line(kind: str, found: Hang) -> None:
    other = 1 - found.guilty
    output = found.lines[other]
    print(f"{kind}: told {found.seconds - TIMEOUTS[kind]:.2f} s over --timeout: {output}")  # pytest -rP shows it
    (line,) = output.splitlines()
    assert line.startswith(
        f"error: no progress for {TIMEOUTS[kind]} s: rank {found.guilty} ({HOST}, pid {found.pids[found.guilty]})"
    )
    assert f" at {place(kind)}" in line
    waits = rf"; rank {other} \({HOST}, pid {found.pids[other]}\) (waits in sum 7|last seen) at program.py:"
    assert re.search(waits, line)
    words = {"stopped": f"stopped by a signal (kill -CONT {found.pids[1]} ", "interpreter": "held by C code"}
    if kind in words:
        assert re.search(rf"last alive at step \d, silent for \d+ s, .*{re.escape(words[kind])}", line)
        assert (f", last seen at {place(kind)}" in line) == (kind == "stopped")
    elif kind not in ("heartbeats", "unexplained"):  # in these two kinds, the rank may have ended or be silent
        assert " last alive at step 3" in line
        assert ", not in a collective; " in line


def check_hang_report(hangs: dict[str, Hang], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for kind in ("loader", "interpreter"):
        assert hang_report.main([str(hangs[kind].run_dir)]) == 0
        output = capsys.readouterr().out
        assert hangs[kind].lines[0].partition("s: ")[2].strip() in output
        name = {"loader": "loader/program.py", "interpreter": "interpreter/program.py"}[kind]
        line = place(kind).partition(":")[2].partition(" ")[0]
        assert re.search(rf"rank 1  {HOST}  pid \d+  step \d\n(silent .*\n)?  {name}:{line} {kind}\n", output)
        assert re.search(rf"rank 0  {HOST}  pid \d+  step 3\nin sum 7\n  {name}:\d+ wait\n      time.sleep", output)
        assert f"{name}:{len(PROGRAM.splitlines())} <module>\n      globals()[kind]()" in output


def check_lone_hang_report(found: Hang, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the report on a run dir that has only the last heartbeat and the stack file of one rank."""
    (folder / "log").mkdir(parents=True)
    for name in ("alive-1", "stack-1.txt"):
        (folder / "log" / name).write_bytes((found.run_dir / "log" / name).read_bytes())
    assert hang_report.main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert "its interpreter is held by C code\n" in output
    assert f"program.py:{place('interpreter').partition(':')[2].partition(' ')[0]} interpreter" in output


# --- a rank's location and the collective it waits for ----------------------------------------------------------------


PACKAGE = str(Path(samestep.__file__).parent)
TRAIN = rank_files.CodeLocation("/home/me/distributed/app/train.py", 7, "train")
REDUCE = rank_files.CodeLocation(f"{PACKAGE}/torch/reduction.py", 9, "ordered_all_reduce")
NUMPY = rank_files.CodeLocation("/home/me/distributed/app/.venv/lib/python3.11/site-packages/numpy/core.py", 3, "sum")
TORCH = rank_files.CodeLocation("/x/site-packages/torch/distributed/distributed_c10d.py", 5, "all_reduce")


@pytest.mark.parametrize(
    ("calls", "expected", "waits"),
    [
        ([TORCH, REDUCE, TRAIN], TRAIN, True),  # the location is in the program, not in the package
        ([REDUCE, TRAIN], TRAIN, False),
        ([NUMPY, TRAIN], TRAIN, False),  # numpy lies below the program's folder, but is not part of the program
        ([TORCH, REDUCE, NUMPY], REDUCE, True),
        ([TORCH, NUMPY], TORCH, False),
        ([NUMPY, TRAIN, TORCH], TRAIN, False),  # a hook: the framework has called the program
    ],
)
def test_the_location_is_the_innermost_call_of_the_program(
    calls: list[rank_files.CodeLocation], expected: rank_files.CodeLocation, waits: bool
) -> None:
    program = Path(TRAIN.file).parent
    assert rank_files.own_location(calls, program) == expected
    assert rank_files.is_in_collective(calls, program) == waits


@pytest.fixture
def dog(tmp_path: Path) -> watchdog.Watchdog:
    """Return the started watchdog of rank 0 of 2, which writes into ``tmp_path``."""
    started = watchdog.Watchdog()
    started.start(World(0, 2), Options(timeout=LIMIT))
    started.write_to(tmp_path)
    return started


def test_a_collective_is_pending_while_its_context_is_open(dog: watchdog.Watchdog) -> None:
    def seen() -> tuple[Any, bool]:
        values = dog.state()
        assert values["collective"] == dog.values()["collective"]
        return values["collective"], values["waiting"]

    assert seen() == (None, False)
    with dog.collective("step"):
        assert seen() == ({"name": "step", "number": 1, "pending": True}, True)
    with contextlib.suppress(ZeroDivisionError), dog.collective("step"):
        with dog.collective("inner"):
            assert seen() == ({"name": "inner", "number": 3, "pending": True}, True)
        assert seen() == ({"name": "step", "number": 2, "pending": True}, True)
        raise ZeroDivisionError
    assert seen() == (None, False)


def test_the_frameworks_own_record_comes_first(dog: watchdog.Watchdog) -> None:
    recorded = {"name": "all_reduce 20", "number": 20, "pending": False}
    dog.last_collective = lambda: recorded
    with dog.collective("step"):
        assert (dog.state()["collective"], dog.state()["waiting"]) == (recorded, True)


def test_a_record_that_cannot_be_read_is_reported_once(dog: watchdog.Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of collectives comes from a private function of torch, which another version may lack."""
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)

    def missing() -> None:
        raise AttributeError("no _dump_fr_trace_json")

    dog.last_collective = missing
    dog.resume_at(7)
    with dog.collective("step"):
        assert dog.state()["collective"] == {"name": "step", "number": 1, "pending": True}
    (line,) = lines
    assert "(no _dump_fr_trace_json)" in line


# --- the diagnosis of many ranks, from files ------------------------------------------------------------------------


WAITS = ("/a/train.py", 105, "train", "dist.all_reduce(sums)  # collective")
SLEEPS = ("/a/data.py", 31, "batch", "time.sleep(1000)")
NOW = {"job": "j", "time": 1001.0, "rank": 0, "pid": 100, "host": "h"}


def left(folder: Path, rank: int, at: tuple[str, int, str, str], **more: Any) -> None:
    """Write the hang file of one of 64 ranks. The rank waits for the others if ``at`` is WAITS."""
    values = {"rank": rank, "world_size": 64, "host": "h", "pid": 100 + rank, "step": 57, "time": 1000.0, "job": "j"}
    values |= {"at": at, "waiting": at == WAITS, "collective": None, "waited": 5.0}
    values |= {"threads": [{"name": "MainThread", "calls": [at]}], **more}
    (folder / "log").mkdir(exist_ok=True)
    (folder / "log" / f"hang-{rank}.json").write_text(json.dumps(values))


def diagnosed(folder: Path, world_size: int = 64) -> str:
    found = [hang_diagnosis.read_state(folder / "log", rank, NOW) for rank in range(world_size)]
    states = [state for state in found if state]
    return hang_diagnosis.format_diagnosis(hang_diagnosis.diagnose(states, world_size))


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_another_hosts_clock_is_not_compared_with_this_ones(tmp_path: Path, ahead: float) -> None:
    """On a shared disk, the modification times of files show how long a rank has been silent."""
    left(tmp_path, 0, WAITS)
    left(tmp_path, 1, SLEEPS, host="other", time=1000.0 + ahead)
    assert diagnosed(tmp_path, 2).startswith("rank 1 (other, pid 101) last alive at step 57 is at")

    (tmp_path / "log" / "hang-1.json").unlink()
    for rank, host, clock in ((0, "h", 0.0), (1, "other", ahead)):
        values = {"rank": rank, "pid": 100 + rank, "host": host, "job": "j", "step": 57, "time": 1000.0 + clock}
        (tmp_path / "log" / f"alive-{rank}").write_text(json.dumps({**values, "at": WAITS[:3]}))
    state = hang_diagnosis.read_state(tmp_path / "log", 1, NOW)
    assert state is not None
    assert state.trouble == ""
    os.utime(tmp_path / "log" / "alive-1", (0, (tmp_path / "log" / "alive-0").stat().st_mtime - 40))
    state = hang_diagnosis.read_state(tmp_path / "log", 1, NOW)
    assert state is not None
    assert state.trouble == "silent for 40 s"


def test_of_many_ranks_the_one_that_is_not_in_the_collective_is_named(tmp_path: Path) -> None:
    for rank in range(64):
        left(tmp_path, rank, {7: SLEEPS}.get(rank, WAITS), step={9: 56}.get(rank, 57))
    assert diagnosed(tmp_path) == (
        "rank 7 (h, pid 107) last alive at step 57 is at data.py:31 in batch (time.sleep(1000)), not in a "
        "collective; the others wait at train.py:105 in train (dist.all_reduce(sums))"
    )


def test_of_ranks_that_are_not_known_to_wait_the_smallest_group_is_named(tmp_path: Path) -> None:
    """The framework records no collectives, so ranks wait where the program reads a result, or inside the framework."""
    reads = ("/a/train.py", 137, "train", "float(loss)")
    for rank in range(64):
        left(tmp_path, rank, {7: SLEEPS}.get(rank, reads))
    assert diagnosed(tmp_path).startswith("rank 7 (h, pid 107) last alive at step 57 is at data.py:31 in batch ")
    assert diagnosed(tmp_path, 8).endswith("; the others are at train.py:137 in train (float(loss))")
    step = ("/a/train.py", 60, "train_step", "optimizer.step()")
    calls = [("/x/site-packages/horovod/torch/mpi_ops.py", 9, "synchronize", "wait(handle)"), step]
    waiting = rank_files.is_in_collective([rank_files.CodeLocation(*call) for call in calls], Path("/a"))
    left(tmp_path, 0, step, threads=[{"name": "MainThread", "calls": calls}], waiting=waiting)
    left(tmp_path, 1, SLEEPS)
    assert diagnosed(tmp_path, 2) == (
        "rank 1 (h, pid 101) last alive at step 57 is at data.py:31 in batch (time.sleep(1000)), not in a "
        "collective; rank 0 (h, pid 100) waits at train.py:60 in train_step (optimizer.step())"
    )


def test_ranks_that_wait_in_what_few_wait_in_are_named(tmp_path: Path) -> None:
    gather = ("/a/distributed.py", 92, "all_gather", "dist.all_gather(gathered, local)  # collective")
    for rank in range(64):
        name = {7: "all_gather"}.get(rank, "all_reduce")
        kind = {"name": f"{name} 20 [4] double", "number": 20, "pending": True}
        left(tmp_path, rank, {7: gather}.get(rank, WAITS), collective=kind)
    assert diagnosed(tmp_path) == (
        "rank 7 (h, pid 107) last alive at step 57 waits in all_gather 20 [4] double at distributed.py:92 in "
        "all_gather (dist.all_gather(gathered, local)); the others wait in all_reduce 20 [4] double at train.py:105 in "
        "train (dist.all_reduce(sums))"
    )


def test_the_rank_whose_last_collective_has_the_lowest_number_is_named(tmp_path: Path) -> None:
    for rank in range(64):
        number = {7: 19}.get(rank, 20)
        left(tmp_path, rank, WAITS, collective={"name": f"all_reduce {number}", "number": number, "pending": True})
    assert diagnosed(tmp_path).startswith(
        "rank 7 (h, pid 107) last alive at step 57 waits in all_reduce 19 at train.py:105"
    )


def test_where_all_that_are_seen_wait_those_never_seen_are_named_first(tmp_path: Path) -> None:
    """Without a shared disk, each of two machines has only the files of its own ranks."""
    for rank in range(32):
        left(tmp_path, rank, WAITS)
    assert diagnosed(tmp_path) == (
        "32 of 64 ranks never seen from here: 32-63; ranks 0-31 wait at train.py:105 in train (dist.all_reduce(sums))"
    )
    left(tmp_path, 3, SLEEPS)
    assert diagnosed(tmp_path).startswith("rank 3 (h, pid 103) last alive at step 57 is at data.py:31 in batch")
    assert diagnosed(tmp_path).endswith("; 32 of 64 ranks never seen from here: 32-63")


def test_files_that_block_or_are_damaged_are_passed_over(tmp_path: Path) -> None:
    left(tmp_path, 0, WAITS)
    os.mkfifo(tmp_path / "log" / "hang-1.json")  # opening a FIFO for reading would wait for a writer
    os.mkfifo(tmp_path / "log" / "alive-1")
    for rank, content in enumerate(["", "{", "[]", "7", '{"job": "j", "rank": 5, "time": 1000, "pid": 1}'], start=2):
        (tmp_path / "log" / f"hang-{rank}.json").write_text(content)
    assert diagnosed(tmp_path, 7).startswith("6 of 7 ranks never seen from here: 1-6; rank 0 (h, pid 100) waits at")


def test_hang_report_tells_ranks_that_stand_alike_once_and_names_those_it_knows_nothing_of(tmp_path: Path) -> None:
    for rank in range(32):
        left(tmp_path, rank, {7: SLEEPS}.get(rank, WAITS), verdict="rank 7 sleeps")
    wide, narrow = (hang_report.report(hang_report.newest(tmp_path), False, columns) for columns in (140, 80))
    assert "rank 7 sleeps" in narrow[1]
    assert narrow[2:] == [
        "",
        "rank 7  h  pid 107  step 57",
        "  a/data.py:31 batch",
        "      time.sleep(1000)",
        "",
        "ranks 0-6, 8-31  h  step 57",
        "  a/train.py:105 train",
        "      dist.all_reduce(sums)  # collective",
        "",
        "ranks 32-63: nothing here; if they ran on another machine, run this there, or give that machine's copy of the "
        "run dir as a further RUN_DIR",
    ]
    assert [line.split() for line in wide[3:5]] == [
        "rank 7 h pid 107 step 57 ranks 0-6, 8-31 h step 57".split(),
        "a/data.py:31 batch a/train.py:105 train".split(),
    ]


def test_hang_report_takes_the_newest_hang_of_each_machines_run_dir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for machine in range(2):
        (tmp_path / str(machine)).mkdir()
        for rank in range(32 * machine, 32 * machine + 32):
            left(tmp_path / str(machine), rank, WAITS, host=f"h{machine}", job=f"j{machine}", verdict=f"as {machine}")
    left(tmp_path / "0", 60, SLEEPS, time=10.0)  # from an earlier hang
    assert hang_report.main([str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    output = capsys.readouterr().out
    assert "as seen from h0: as 0\nas seen from h1: as 1\n" in output
    assert "ranks 0-63  h0, h1  step 57" in output
    assert "nothing here" not in output
    assert "time.sleep" not in output


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such folder"), ("run", "holds no hang")])
def test_hang_report_of_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (tmp_path / "run" / "log").mkdir(parents=True)
    assert hang_report.main([str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(rf"error: {tmp_path / name}.*{words}.*\n", output.err)


@pytest.mark.parametrize(
    ("ranks", "second", "here"),
    [
        (2, "lives", True),
        (2, "gone", False),  # rank 1 has ended, so its launcher ends the other ranks
        (2, "of another job", False),
        (2, "nowhere", False),  # rank 1 has not created its Run
        (1, "nowhere", True),
    ],
)
def test_whether_all_ranks_of_a_job_live_is_known(
    dog: watchdog.Watchdog, tmp_path: Path, ranks: int, second: str, here: bool
) -> None:
    """If all ranks live, a SIGTERM is a stop request. If a rank has ended, a SIGTERM comes from the launcher."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait(timeout=LIMIT)
    (tmp_path / "alive-0").write_text(json.dumps(dog.values()))
    others: dict[str, dict[str, Any]] = {"gone": {"pid": ended.pid}, "of another job": {"job": "another"}}
    if second != "nowhere":
        (tmp_path / "alive-1").write_text(json.dumps({**dog.values(), "rank": 1, **others.get(second, {})}))
    assert dog.all_ranks_alive(ranks) == here
    assert hang_diagnosis.rank_is_lost(tmp_path, dog.job, world_size=2) == (second == "gone")


def test_a_crash_after_other_stacks_is_still_reported(tmp_path: Path) -> None:
    """If a heartbeat is late, stacks are written to the file of crashes. The next heartbeat removes them."""
    code = f"""
import faulthandler, os, time
from pathlib import Path
from samestep import log
from samestep.env import World
from samestep.options import Options
from samestep.recovery import watchdog
dog = watchdog.Watchdog()
dog.start(World(0, 1), Options(timeout=60))
dog.write_to(Path({str(tmp_path)!r}))
faulthandler.dump_traceback(dog._stacks)
dog._write_heartbeat()
os.abort()
"""
    environ = {**os.environ, "PYTHONPATH": CORE, "SAMESTEP_JOB_INFO": '{"job": "j"}'}
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=LIMIT, check=False)
    assert "died (Aborted) at" in hang_diagnosis.crashes(tmp_path, "j")
    assert hang_diagnosis.crashes(tmp_path, "another") == ""
