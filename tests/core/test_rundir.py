"""A run's folder: one writer, nothing of an earlier run lost, and one decision on what a run goes on from."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from programs import HOLD, LIMIT, TRY, child, running, start
from samestep import checkpoint, rundir


def save(run_dir: Path, step: int) -> Path:
    folder = checkpoint.save(run_dir, "toy", step, {"model": {"w": np.ones(3)}}, {}, {}, keep=9)
    checkpoint.finish()
    return folder


def steps(run_dir: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in (run_dir / "checkpoints").glob("step-*"))


def no_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


# --- its locks ---------------------------------------------------------------------------------------------------


def test_a_second_job_waits_and_then_names_the_holder(tmp_path: Path) -> None:
    with running(HOLD.format("LAUNCHER_BYTE"), tmp_path, until="held") as holder:
        done = child(TRY.format("LAUNCHER_BYTE", 0.5), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    waiting, refused = done.stderr.splitlines()
    for line in (waiting, refused):
        assert f"{tmp_path} is in use by the first job (host " in line
        assert f"pid {holder.pid}" in line
    assert waiting.startswith("warning: ")
    assert refused.startswith("error: ")
    assert "--run-dir" in refused


def test_a_second_job_goes_on_when_the_first_is_done(tmp_path: Path) -> None:
    with (
        running(HOLD.format("WRITER_BYTE"), tmp_path, until="held") as holder,
        start(TRY.format("WRITER_BYTE", LIMIT), tmp_path) as second,
    ):
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        holder.communicate(timeout=LIMIT)  # its stdin ends, and so does it
        out, _ = second.communicate(timeout=LIMIT)
    assert (second.returncode, out) == (0, "got it\n")


def test_a_killed_job_holds_nothing(tmp_path: Path) -> None:
    with running(HOLD.format("LAUNCHER_BYTE"), tmp_path, until="held"):
        pass  # SIGKILL
    done = child(TRY.format("LAUNCHER_BYTE", 0), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "got it\n", "")


@pytest.mark.parametrize(("held", "wanted"), [("LAUNCHER_BYTE", "WRITER_BYTE"), ("WRITER_BYTE", "LAUNCHER_BYTE")])
def test_launch_script_and_rank_0_do_not_lock_each_other_out(tmp_path: Path, held: str, wanted: str) -> None:
    with running(HOLD.format(held), tmp_path, until="held"):
        assert child(TRY.format(wanted, 0), tmp_path).returncode == 0
        assert child(TRY.format(held, 0), tmp_path).returncode == 2


def test_a_byte_that_was_given_up_is_free_and_the_other_is_not(tmp_path: Path) -> None:
    code = """
lock = rundir.Lock(run_dir, "the first job")
lock.acquire(rundir.LAUNCHER_BYTE)
lock.acquire(rundir.WRITER_BYTE)
lock.release(rundir.WRITER_BYTE)
print("held", flush=True)
sys.stdin.read()
"""
    with running(code, tmp_path, until="held"):
        assert child(TRY.format("WRITER_BYTE", 0), tmp_path).returncode == 0
        assert child(TRY.format("LAUNCHER_BYTE", 0), tmp_path).returncode == 2


def test_the_ranks_a_job_starts_do_not_inherit_its_lock(tmp_path: Path) -> None:
    """A rank that outlives its killed launch script must not hold that one's lock."""
    code = """
import subprocess
rundir.Lock(run_dir, "the first job").acquire(rundir.LAUNCHER_BYTE)
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=0, stdout=2)
print(rank.pid, flush=True)
sys.stdin.read()
"""
    with start(code, tmp_path, stdin=PIPE) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT)[0]
        rank = int(process.stdout.readline())
        process.kill()
    try:
        assert child(TRY.format("LAUNCHER_BYTE", 0), tmp_path).returncode == 0
    finally:
        os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_run_dir_that_cannot_be_locked_is_the_callers_mistake(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = child(TRY.format("LAUNCHER_BYTE", 0), tmp_path / place)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot use --run-dir {tmp_path / place}: ")
    assert len(done.stderr.splitlines()) == 1


# --- the folder --------------------------------------------------------------------------------------------------


def test_set_aside_moves_the_earlier_run_and_nothing_else(tmp_path: Path) -> None:
    rundir.set_aside(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for _ in range(3):  # all within a second, perhaps
        save(tmp_path, 3)
        for name in ("metrics.jsonl", "model.safetensors", "result.json", "notes.txt"):
            (tmp_path / name).write_text(name)
        (tmp_path / "log").mkdir(exist_ok=True)
        rundir.set_aside(tmp_path)
        assert checkpoint.newest(tmp_path, no_warning) is None
    aside = sorted(tmp_path.glob("earlier-*"))
    assert len(aside) == 3
    for folder in aside:
        moved = sorted(path.name for path in folder.iterdir())
        assert moved == ["checkpoints", "metrics.jsonl", "model.safetensors", "result.json"]
        assert steps(folder) == [3]
    assert sorted(path.name for path in tmp_path.iterdir() if path not in aside) == ["log", "notes.txt"]


def test_make_unique_never_returns_a_folder_twice(tmp_path: Path) -> None:
    names = [rundir.make_unique(tmp_path / "runs" / "now").name for _ in range(4)]
    assert names == ["now", "now-2", "now-3", "now-4"]
