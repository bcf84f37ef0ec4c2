"""Test that a run dir has one writer, keeps earlier runs, and decides which checkpoint a run resumes from."""

from __future__ import annotations

import errno
import hashlib
import os
import select
import shutil
import signal
import sys
from io import StringIO
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from programs import HOLD, LIMIT, TRY, child, running, start
from samestep import ConfigError, NonRetryableError, checkpoint, log, rundir, step_losses, trace
from samestep.data import datasets, files
from samestep.options import Options, Parser, add_common, resume_invariants
from threads import parse, put


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of a job without a launch script, with MNIST in its folder ``data``."""
    monkeypatch.delenv("SAMESTEP_JOB_INFO", raising=False)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "data")
    return tmp_path


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Capture the console's standard error."""
    found = StringIO()
    monkeypatch.setattr(log, "_console_errors", found)
    return found


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


def test_a_second_job_continues_when_the_first_has_ended(tmp_path: Path) -> None:
    with (
        running(HOLD.format("WRITER_BYTE"), tmp_path, until="held") as holder,
        start(TRY.format("WRITER_BYTE", LIMIT), tmp_path) as second,
    ):
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        holder.communicate(timeout=LIMIT)  # closes the holder's stdin, which ends the holder
        out, _ = second.communicate(timeout=LIMIT)
    assert (second.returncode, out) == (0, "got it\n")


def test_a_killed_job_holds_nothing(tmp_path: Path) -> None:
    with running(HOLD.format("LAUNCHER_BYTE"), tmp_path, until="held"):
        pass  # the end of the block kills the holder
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


def test_a_full_disk_prevents_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    rundir.Lock(tmp_path, "the first job").acquire(rundir.LAUNCHER_BYTE)
    done = child(TRY.format("LAUNCHER_BYTE", 0), tmp_path)
    assert done.returncode == 2
    assert "is in use by another process" in done.stderr


def test_the_ranks_a_job_starts_do_not_inherit_its_lock(tmp_path: Path) -> None:
    """A rank that outlives its killed launch script must not keep the script's lock."""
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
    rundir.archive_previous_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for _ in range(3):  # possibly all within one second
        save(tmp_path, 3)
        for name in ("metrics.jsonl", "model.safetensors", "result.json", "notes.txt"):
            (tmp_path / name).write_text(name)
        (tmp_path / "log").mkdir(exist_ok=True)
        for name in (step_losses.NAME, trace.NAME, "log/rank-0.log"):
            (tmp_path / name).write_text(name)
        rundir.archive_previous_run(tmp_path)
        assert checkpoint.newest(tmp_path, no_warning) is None
    aside = sorted(tmp_path.glob("earlier-*"))
    assert len(aside) == 3
    for folder in aside:
        moved = sorted(path.name for path in folder.iterdir())
        assert moved == ["checkpoints", "log", "metrics.jsonl", "model.safetensors", "result.json"]
        assert {f"log/{path.name}" for path in (folder / "log").iterdir()} == {step_losses.NAME, trace.NAME}
        assert steps(folder) == [3]
    assert sorted(path.name for path in tmp_path.iterdir() if path not in aside) == ["log", "notes.txt"]


def test_make_folder_never_returns_a_unique_folder_twice(tmp_path: Path) -> None:
    names = [rundir.make_folder(tmp_path / "runs" / "now", unique=True).name for _ in range(4)]
    assert names == ["now", "now-2", "now-3", "now-4"]


def test_a_claimed_run_dir_is_made_and_returned_as_an_absolute_path(run_folder: Path) -> None:
    found, _ = rundir.lock_run_dir("toy", Path("a", "..", "run"))
    assert found == run_folder / "run"
    assert (found / "log").is_dir()
    assert f"toy, started by {Path(sys.argv[0]).name} (host " in (found / ".lock").read_text()


CLAIM = """
rundir.LOCK_SECONDS = 0.0
def main():
    rundir.lock_run_dir("toy", run_dir)
    print("got it")
log.run(main)
"""


@pytest.mark.parametrize(
    ("held", "under_script", "code"),
    [("LAUNCHER_BYTE", True, 0), ("LAUNCHER_BYTE", False, 2), ("WRITER_BYTE", True, 2)],
)
def test_rank_0_holds_both_bytes_where_no_launch_script_holds_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, under_script: bool, code: int
) -> None:
    if under_script:
        monkeypatch.setenv("SAMESTEP_JOB_INFO", '{"launcher": "1@elsewhere"}')
    else:
        monkeypatch.delenv("SAMESTEP_JOB_INFO", raising=False)
    with running(HOLD.format(held), tmp_path, until="held"):
        done = child(CLAIM, tmp_path)
    assert (done.returncode, done.stdout) == (code, "" if code else "got it\n")


@pytest.mark.parametrize("in_the_way", ["runs", "runs/toy"])
def test_a_new_run_dir_that_cannot_be_made_is_the_callers_mistake(run_folder: Path, in_the_way: str) -> None:
    (run_folder / in_the_way).parent.mkdir(exist_ok=True)
    (run_folder / in_the_way).write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot make .*/runs/toy/.*: name another place with --run-dir"):
        rundir.new("toy")


@pytest.mark.parametrize(
    ("job", "restart"),
    [
        ({"TORCHELASTIC_RUN_ID": "one"}, {"TORCHELASTIC_RESTART_COUNT": "2"}),
        ({"SLURM_JOB_ID": "77"}, {"SLURM_RESTART_COUNT": "1"}),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RESTART_COUNT": "1"}),  # the parent process identifies the job
    ],
)
def test_ranks_that_their_launcher_starts_again_find_their_run_dir_and_a_new_job_gets_another(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, str], restart: dict[str, str]
) -> None:
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    first = rundir.resolve("toy", parse()).run_dir
    second = rundir.resolve("toy", parse()).run_dir
    assert first.parent == run_folder / "runs" / "toy"
    assert first != second
    for name, value in restart.items():
        monkeypatch.setenv(name, value)
    assert rundir.resolve("toy", parse(), fresh=False).run_dir == second
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert rundir.resolve("toy", parse(), fresh=False).run_dir not in (first, second)


# --- what a run in it resumes from -------------------------------------------------------------------------------


def begun(run_dir: Path, *saved: int, **state: Any) -> Options:
    """Save checkpoints of the steps ``saved``, and return the options of their run."""
    options = parse("--run-dir", str(run_dir))
    fingerprint = datasets.resolve("mnist", options.data_dir).fingerprint
    for step in saved:
        state = {"requested_dataset": "mnist", "dataset_fingerprint": fingerprint, **state}
        recorded = {**resume_invariants(options), "dataset": "mnist"}
        checkpoint.save(run_dir, "toy", step, {"model": {"w": np.ones(3)}}, state, recorded, keep=9)
    checkpoint.finish()
    return options


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def spoil(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_a_launch_script_judges_by_manifests_and_neither_renames_nor_warns(run_folder: Path, console: StringIO) -> None:
    options = begun(run_folder / "run", 1, 2, 3, 4)
    spoil(run_folder / "run" / "checkpoints" / "step-00000003")
    (run_folder / "run" / "checkpoints" / "step-00000004" / "manifest.json").write_bytes(b"{}")
    before = contents(run_folder / "run" / "checkpoints")
    quick = rundir.resolve("toy", options, verify=False)
    assert quick.checkpoint is not None
    assert quick.checkpoint.step == 3  # the manifest of step 3 is valid
    assert console.getvalue() == ""
    assert contents(run_folder / "run" / "checkpoints") == before
    verified = rundir.resolve("toy", options)
    assert verified.checkpoint is not None
    assert verified.checkpoint.step == 2
    warnings = console.getvalue().splitlines()
    assert [line.split(" (")[0] for line in warnings] == [
        "warning: checkpoint step-00000004",
        "warning: checkpoint step-00000003",
    ]
    assert sorted(path.name for path in (run_folder / "run" / "checkpoints").iterdir()) == [
        "damaged-step-00000003",
        "damaged-step-00000004",
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.parametrize("verify", [True, False])
def test_other_data_are_refused_before_any_array_is_read(run_folder: Path, verify: bool) -> None:
    options = begun(run_folder / "run", 1, 2)
    put(run_folder / "data", label=1)
    with pytest.raises(ConfigError, match=r"was trained on other data: .*/data/mnist has changed since"):
        rundir.resolve("toy", options, verify=verify)
    assert steps(run_folder / "run") == [1, 2]


@pytest.mark.parametrize(("verify", "warnings"), [(True, 1), (False, 0)])
def test_a_checkpoint_that_does_not_name_its_data_is_one_warning(
    run_folder: Path, console: StringIO, verify: bool, warnings: int
) -> None:
    options = begun(run_folder / "run", 1, dataset_fingerprint=None)
    assert rundir.resolve("toy", options, verify=verify).dataset.fingerprint is not None
    assert len(console.getvalue().splitlines()) == warnings


def test_without_any_network_the_embedded_digits_are_used_and_what_was_asked_for_is_remembered(
    run_folder: Path, console: StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run_folder / "data")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no process listens at port 9 (discard)
    monkeypatch.delenv("no_proxy", raising=False)
    found = rundir.resolve("toy", parse("--run-dir=run"))
    assert (found.dataset.name, found.requested_dataset, found.checkpoint) == ("mnist-5k", "mnist", None)
    assert "MNIST could not be downloaded" in console.getvalue()
    with pytest.raises(ConfigError, match=r"cannot download mnist .*: choose mnist-5k"):  # the user named the dataset
        rundir.resolve("toy", parse("--run-dir=named", "--dataset=mnist"))


def test_no_resume_sets_aside_what_cannot_even_be_read(run_folder: Path) -> None:
    options = begun(run_folder / "run", 1)
    spoil(run_folder / "run" / "checkpoints" / "step-00000001")
    with pytest.raises(NonRetryableError, match="no checkpoint"):
        rundir.resolve("toy", options)
    options.resume = False
    assert rundir.resolve("toy", options).checkpoint is None
    assert steps(run_folder / "run") == []
    assert len(list((run_folder / "run").glob("earlier-*"))) == 1


def test_an_app_may_bring_a_data_set_of_its_own(run_folder: Path) -> None:
    """An app's own function finds the dataset, and a resume must find the same data."""
    asked: list[tuple[str, Path, bool]] = []

    def resolve(name: str, data_dir: Path, fallback: bool = True) -> files.DatasetInfo:
        asked.append((name, data_dir, fallback))
        content = (data_dir / "own.bin").read_bytes()
        return files.DatasetInfo(name, data_dir, fingerprint=hashlib.sha256(content).hexdigest())

    parser = Parser()
    add_common(parser, epochs=1, global_batch_size=1, lr="1", datasets=("own",), devices=("cpu",), resolve=resolve)
    options = parser.parse(["--run-dir=run"])
    (run_folder / "data" / "own.bin").write_bytes(b"one")
    found = rundir.resolve("toy", options)
    assert (found.dataset.name, found.dataset.fingerprint) == ("own", hashlib.sha256(b"one").hexdigest())
    state = {"requested_dataset": "own", "dataset_fingerprint": found.dataset.fingerprint}
    checkpoint.save(Path("run"), "toy", 3, {}, state, {**resume_invariants(options), "dataset": "own"}, keep=1)
    checkpoint.finish()
    assert rundir.resolve("toy", options).checkpoint is not None
    assert asked == [("own", Path("data"), True), ("own", Path("data"), False)]
    (run_folder / "data" / "own.bin").write_bytes(b"two")
    with pytest.raises(ConfigError, match="was trained on other data"):
        rundir.resolve("toy", options)
