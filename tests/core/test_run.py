"""Test `Run` from start to result without a framework. The ranks are threads."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import threads
from programs import HOLD, running, verdict
from samestep import ConfigError, NonRetryableError, RemoteRankError, RetryableError, checkpoint, log
from samestep.env import World, processor
from samestep.monitor import Monitor
from samestep.options import resume_invariants
from samestep.recovery.watchdog import Watchdog
from samestep.run import Run
from samestep.sharding import GlobalBatches
from samestep.step_sync import Totals
from samestep.step_timer import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER, StepTimer
from samestep.stop import Stopped
from threads import COUNTING, CrashError, Faults, LeftAloneError, Model, Rank, job, loss_of, parse, put

EPOCH = 4  # steps: 20 images in batches of 6
STEPS = 3 * EPOCH
AGAIN = "a restart resumes from an earlier checkpoint"
ONCE = f"unless a flipped bit caused it; {AGAIN}"


@dataclasses.dataclass
class Console:
    """The run dir, rank and ``quiet`` of each call of `log.start`, and the console's stdout and stderr in memory."""

    started: list[tuple[Path, int, bool]]
    out: StringIO
    errors: StringIO

    def warnings(self) -> list[str]:
        return [line for line in self.errors.getvalue().splitlines() if line.startswith("warning: ")]


@pytest.fixture(autouse=True)
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    """Isolate the test: remove launcher variables, change to a new folder, and keep the output in memory."""
    found = Console([], StringIO(), StringIO())

    def start(run_dir: Path, rank: int, quiet: bool, monitor: Monitor) -> None:
        (run_dir / "log").mkdir(parents=True, exist_ok=True)
        found.started.append((run_dir, rank, quiet))

    monkeypatch.setattr(log, "start", start)
    monkeypatch.setattr(log, "_console", found.out)
    monkeypatch.setattr(log, "_console_errors", found.errors)
    for name in ("SAMESTEP_JOB_INFO", "SAMESTEP_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "data")
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def options_for(run_dir: Path, *options: str) -> list[str]:
    return ["--run-dir", str(run_dir), "--log-every=1", "--checkpoint-every=2", *options]


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step lines of metrics.jsonl, without ``samples_per_second``."""
    lines = [line for line in lines_of(run_dir) if "step" in line]
    return [{name: value for name, value in line.items() if name != "samples_per_second"} for line in lines]


def result_of(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


def state_of(run_dir: Path) -> dict[str, Any]:
    found = checkpoint.newest(run_dir, lambda text: None)
    assert found is not None
    return found.state


def crash(at: int) -> Faults:
    """Return faults that crash all ranks after the update ``at``, before the run records the update."""

    def after_update(rank: int, done: int, model: Model) -> None:
        if done == at:
            raise CrashError

    return Faults(after_update=after_update)


def stopped_after(run_dir: Path, step: int, *options: str, ranks: int = 2, faults: Faults | None = None) -> None:
    """Train until all ranks crash in the update after ``step``."""
    faults = dataclasses.replace(faults or Faults(), after_update=crash(step + 1).after_update)
    for rank in job(ranks, options_for(run_dir, *options), faults):
        assert isinstance(rank.error, CrashError), rank.error


def all_done(ranks: list[Rank]) -> list[Run]:
    return [rank.done for rank in ranks]


def the_same(one: Path, other: Path) -> None:
    """Assert that two runs logged and returned the same values, except durations, world sizes, starts and folders."""
    assert steps_of(one) == steps_of(other)
    differs = {"world_size", "seconds", "samples_per_second", "resumed_from_step", "run_dir", "restarts"}
    first = result_of(one)
    second = result_of(other)
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} <= differs


# --- before anything -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["dtype", "epochs", "seed"])
def test_options_that_lack_what_every_result_repeats_fail_before_training(run_dir: Path, missing: str) -> None:
    options = parse(*options_for(run_dir))
    delattr(options, missing)
    with pytest.raises(
        NonRetryableError, match=rf"the options of toy lack {missing}: add them in apps/toy/options\.py"
    ):
        Run("toy", options, World(0, 1))
    assert not run_dir.exists()


def test_what_fails_before_training_leaves_its_verdict_for_the_launch_script(run_dir: Path) -> None:
    """Without the file log/no-restart, the launch script would restart the program."""
    code = """
import sys
from pathlib import Path
from samestep import log
from samestep.env import World, processor
from samestep.run import Run
from threads import parse
options = parse(f"--run-dir={sys.argv[1]}")
del options.dtype
log.run(lambda: Run("toy", options, World(0, 1)))
"""
    paths = os.pathsep.join([str(Path(checkpoint.__file__).parents[1]), str(Path(__file__).parent)])
    environ = {**os.environ, "PYTHONPATH": paths, "SAMESTEP_JOB_INFO": '{"launcher": "1@elsewhere"}'}
    command = [sys.executable, "-c", code, str(run_dir)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the options of toy lack dtype: ")
    assert verdict(run_dir) == {"code": 1}


@pytest.mark.parametrize("asked_for", ["3", "1"])
def test_another_number_of_ranks_than_the_launch_script_was_asked_for_is_the_callers_mistake(
    run_dir: Path, asked_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_JOB_INFO", f'{{"ranks": {asked_for}}}')
    with pytest.raises(ConfigError, match=rf"asked for {asked_for} ranks, but 2 joined \(launcher: torchrun\)"):
        Run("toy", parse(*options_for(run_dir)), World(1, 2, launcher="torchrun"))
    monkeypatch.setenv("SAMESTEP_JOB_INFO", '{"ranks": 2}')
    Run("toy", parse(*options_for(run_dir)), World(1, 2))
    assert not run_dir.exists()


def test_under_the_launch_script_which_holds_the_lock_a_rank_writes_from_its_start(
    run_dir: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_JOB_INFO", '{"launcher": "1@elsewhere"}')
    run = Run("toy", parse(*options_for(run_dir), "--quiet"), World(1, 2), Watchdog())
    run.monitor.stop()
    assert console.started == [(run_dir, 1, True)]
    assert json.loads((run_dir / "log" / "alive-1").read_text())["updates"] == 0


def test_under_a_bare_launcher_nothing_is_written_before_the_run_dir_is_locked(run_dir: Path, console: Console) -> None:
    run_dir.mkdir()
    ended: list[list[Rank]] = []
    with running(HOLD.format("WRITER_BYTE"), run_dir, until="held") as holder:
        second = threading.Thread(target=lambda: ended.append(job(2, options_for(run_dir))), daemon=True)
        second.start()
        deadline = time.monotonic() + threads.LIMIT
        while not console.warnings():
            assert time.monotonic() < deadline, "it does not wait"
            time.sleep(0.01)
        assert sorted(path.name for path in run_dir.rglob("*")) == [".lock", "log"]
        assert not console.started
        holder.communicate(timeout=threads.LIMIT)  # closes the holder's stdin, which ends the holder
        second.join(threads.LIMIT)
    all_done(ended[0])
    assert {rank for _, rank, _ in console.started} == {0, 1}
    assert result_of(run_dir)["steps"] == STEPS


# --- restore ---------------------------------------------------------------------------------------------------------


def test_a_new_run_begins_at_0_with_the_apps_own_weights(run_dir: Path) -> None:
    ranks = job(3, options_for(run_dir, "--max-steps=0"))
    for rank, run in zip(ranks, all_done(ranks)):
        assert (run.first_step, run.last_step, run.resumed_from) == (0, 0, None)
        assert rank.loaded == []
        assert rank.options.dataset == "mnist"
        assert rank.options.run_dir == run_dir


def test_the_start_is_recorded_before_its_line_in_the_log(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """events.jsonl must have the event of a start before the log has the line of the start."""
    recorded: list[bool] = []
    monkeypatch.setattr(
        log, "info", lambda text: recorded.append("1 rank on" in text and (run_dir / "log/events.jsonl").exists())
    )
    all_done(job(1, options_for(run_dir, "--max-steps=0")))
    assert any(recorded)


def test_without_a_run_dir_all_ranks_get_the_same_new_one(tmp_path: Path) -> None:
    for _ in range(2):
        ranks = job(3, ["--max-steps=1"])
        all_done(ranks)
        (folder,) = {rank.options.run_dir for rank in ranks}
        assert folder.is_absolute()
        assert folder.parent == tmp_path / "runs" / "toy"
        assert (folder / "result.json").exists()
    assert len(list((tmp_path / "runs" / "toy").iterdir())) == 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resume_loads_the_same_bytes_on_every_rank(run_dir: Path, world_size: int) -> None:
    stopped_after(run_dir, 6)
    saved = checkpoint.newest(run_dir, lambda text: None)
    assert saved is not None
    ranks = job(world_size, options_for(run_dir, "--max-steps=6"))
    for rank, run in zip(ranks, all_done(ranks)):
        assert (run.first_step, run.last_step, run.resumed_from) == (6, 6, 6)
        assert rank.loaded == [["model", "optimizer"]]
        for group, arrays in rank.model.groups.items():
            for name, array in arrays.items():
                assert array.tobytes() == saved.arrays(group)[name].tobytes()


def refused(ranks: list[Rank], kind: type[Exception], code: int) -> str:
    """Assert that rank 0 raised ``kind`` and that the other ranks end with ``code``; return rank 0's message."""
    assert type(ranks[0].error) is kind, ranks[0].error
    for rank in ranks[1:]:
        assert isinstance(rank.error, RemoteRankError), rank.error
        assert rank.error.exit_code == code
        assert rank.loaded == []
    text = str(ranks[0].error)
    assert text.isprintable()  # printable text is one line
    return text


def other_app(run_dir: Path) -> list[Rank]:
    return job(3, options_for(run_dir), app="lenet")


def other_options(run_dir: Path) -> list[Rank]:
    return job(3, options_for(run_dir, "--lr=2", "--momentum=0.25"))


def no_such_data(run_dir: Path) -> list[Rank]:
    return job(3, options_for(run_dir / "new", "--data-dir=/dev/null"))


def no_such_weights(run_dir: Path) -> list[Rank]:
    return job(3, options_for(run_dir / "new", "--init-from=nowhere.safetensors"))


def damaged_weights(run_dir: Path) -> list[Rank]:
    (run_dir / "bad.safetensors").write_bytes(b"\xff" * 30)
    return job(3, options_for(run_dir / "new", f"--init-from={run_dir}/bad.safetensors"))


def run_dir_is_a_file(run_dir: Path) -> list[Rank]:
    return job(3, options_for(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (other_app, ["holds a run of toy, not of lenet", "choose another --run-dir"]),
        (other_options, ["--lr 1.0 in the checkpoint, 2.0 now", "--momentum 0.5 in the checkpoint, 0.25 now"]),
        (no_such_data, ["the data folder /dev/null is not a folder"]),
        (no_such_weights, ["--init-from nowhere.safetensors", "No such file"]),
        (damaged_weights, ["bad.safetensors is not a readable safetensors file"]),
        (run_dir_is_a_file, ["cannot make", "name another place"]),
    ],
)
def test_the_callers_mistake_is_reported_by_rank_0_and_loads_nothing(
    run_dir: Path, start: Callable[[Path], list[Rank]], expected: list[str]
) -> None:
    stopped_after(run_dir, 6)
    (run_dir / "checkpoints" / "step-00000099").mkdir()  # a damaged checkpoint
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and "log" not in path.parts}
    ranks = start(run_dir)
    text = refused(ranks, ConfigError, 2)
    assert all(words in text for words in expected), text
    assert ranks[0].loaded == []
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != ".lock")


def test_with_no_good_checkpoint_all_ranks_fail_and_nothing_is_lost(run_dir: Path) -> None:
    stopped_after(run_dir, 6)
    before = checkpoints(run_dir)
    for name in before:
        path = run_dir / "checkpoints" / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    ranks = job(3, options_for(run_dir))
    assert "is good" in refused(ranks, NonRetryableError, 1)
    assert ranks[0].loaded == []
    assert checkpoints(run_dir) == before


def test_a_checkpoint_that_does_not_fit_is_fatal_and_reaches_no_other_rank(run_dir: Path) -> None:
    stopped_after(run_dir, 6)
    text = refused(job(3, options_for(run_dir), size=4), NonRetryableError, 1)
    assert "step-00000006 does not fit the model: w has shape [5], not [4]" in text


def test_weights_to_begin_with_that_do_not_fit_are_the_callers_mistake(run_dir: Path) -> None:
    all_done(job(1, options_for(run_dir)))
    text = refused(
        job(3, options_for(run_dir / "new", f"--init-from={run_dir}/model.safetensors"), size=4), ConfigError, 2
    )
    assert text == f"--init-from {run_dir}/model.safetensors does not fit the model: w has shape [5], not [4]"


def test_a_damaged_checkpoint_is_skipped_kept_and_its_steps_are_made_again(run_dir: Path, tmp_path: Path) -> None:
    all_done(job(2, options_for(tmp_path / "undisturbed")))
    stopped_after(run_dir, 8)
    path = run_dir / "checkpoints" / "step-00000008" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert [run.resumed_from for run in all_done(job(3, options_for(run_dir)))] == [6, 6, 6]
    assert "damaged-step-00000008" in checkpoints(run_dir)
    the_same(run_dir, tmp_path / "undisturbed")


def test_weights_to_begin_with_reach_every_rank_without_optimizer_state(run_dir: Path) -> None:
    all_done(job(1, options_for(run_dir / "one")))
    weights = safetensors.numpy.load_file(run_dir / "one" / "model.safetensors")
    ranks = job(3, options_for(run_dir / "two", f"--init-from={run_dir}/one/model.safetensors", "--max-steps=0"))
    for rank, run in zip(ranks, all_done(ranks)):
        assert (run.first_step, run.resumed_from) == (0, None)
        assert rank.loaded == [["model"]]
        assert all(array.tobytes() == weights[name].tobytes() for name, array in rank.model.groups["model"].items())
        assert not rank.model.groups["optimizer"]["w.momentum"].any()
    assert result_of(run_dir / "two")["weights_sha256"] == checkpoint.weights_sha256(weights)


def test_a_checkpoint_wins_over_weights_to_begin_with_and_the_log_says_so(run_dir: Path, console: Console) -> None:
    all_done(job(1, options_for(run_dir / "one", "--seed=7")))
    init_from = f"--init-from={run_dir}/one/model.safetensors"
    stopped_after(run_dir / "two", 6, init_from)
    console.out.truncate(0)
    ranks = job(2, options_for(run_dir / "two", init_from))
    assert [run.resumed_from for run in all_done(ranks)] == [6, 6]
    assert all(rank.loaded == [["model", "optimizer"]] for rank in ranks)
    assert f"step-00000006 of the run dir wins over --init-from {run_dir}/one/model.safetensors" in (
        console.out.getvalue()
    )


def test_no_resume_sets_the_earlier_run_aside(run_dir: Path) -> None:
    stopped_after(run_dir, 6, "--seed=7")
    before = checkpoints(run_dir)
    assert [run.resumed_from for run in all_done(job(2, options_for(run_dir, "--no-resume")))] == [None, None]
    (aside,) = run_dir.glob("earlier-*")
    assert checkpoints(aside) == before
    assert [line["step"] for line in steps_of(aside)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, STEPS + 1))


def test_no_resume_no_longer_applies_to_ranks_that_their_launcher_started_again(run_dir: Path) -> None:
    stopped_after(run_dir, 6, "--no-resume")
    ranks = job(2, options_for(run_dir, "--no-resume"), world={"restart_count": 1})
    assert [run.resumed_from for run in all_done(ranks)] == [6, 6]
    assert not list(run_dir.glob("earlier-*"))


def test_no_resume_applies_to_the_first_process_of_a_job_that_opens_the_run_dir(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that the launcher started first may have ended before it opened the run dir."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    stopped_after(run_dir, 6, "--no-resume")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    for resumed_from in (None, STEPS):
        ranks = job(2, options_for(run_dir, "--no-resume"), world={"restart_count": 1})
        assert [run.resumed_from for run in all_done(ranks)] == [resumed_from, resumed_from]
    assert len(list(run_dir.glob("earlier-*"))) == 1


# --- on which data ---------------------------------------------------------------------------------------------------


def test_data_that_were_swapped_between_two_starts_are_refused(run_dir: Path, tmp_path: Path) -> None:
    stopped_after(run_dir, 6)
    put(tmp_path / "data", label=1)
    before = checkpoints(run_dir)
    ranks = job(3, options_for(run_dir))
    text = refused(ranks, ConfigError, 2)
    assert f"{run_dir} was trained on other data: {tmp_path}/data/mnist has changed since" in text
    assert state_of(run_dir)["dataset_fingerprint"][:12] in text
    assert ranks[0].loaded == []
    assert checkpoints(run_dir) == before
    put(tmp_path / "data")  # the original files
    all_done(job(3, options_for(run_dir)))


def test_data_that_moved_but_did_not_change_are_no_other_data(run_dir: Path, tmp_path: Path) -> None:
    stopped_after(run_dir, 6)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert all_done(job(2, options_for(run_dir, f"--data-dir={tmp_path}/elsewhere")))[0].resumed_from == 6


def test_a_checkpoint_that_does_not_say_which_data_it_saw_is_taken_with_one_warning(
    run_dir: Path, console: Console
) -> None:
    """Checkpoints of earlier versions have no ``dataset_fingerprint``."""
    stopped_after(run_dir, 6)
    found = checkpoint.newest(run_dir, lambda text: None)
    assert found is not None
    state = {name: value for name, value in found.state.items() if name != "dataset_fingerprint"}
    groups = {group: found.arrays(group) for group in found.contents}
    checkpoint.save(run_dir, "toy", 6, groups, state, found.resume_invariants, keep=3)
    checkpoint.finish()
    all_done(job(3, options_for(run_dir)))
    (warning,) = console.warnings()
    assert "step-00000006 does not record its data" in warning
    assert state_of(run_dir)["dataset_fingerprint"] == found.state["dataset_fingerprint"]


def test_a_run_remembers_which_data_were_asked_for_and_which_it_got(run_dir: Path) -> None:
    """Without a network the launch script replaces mnist by mnist-5k; at a resume, a network may be available."""
    options = options_for(run_dir, "--global-batch-size=1000")
    for rank in job(2, [*options, "--dataset=mnist-5k", "--requested-dataset=mnist"], crash(3)):
        assert isinstance(rank.error, CrashError)
    assert state_of(run_dir)["requested_dataset"] == "mnist"
    for asked in (["--dataset=mnist"], [], ["--dataset=mnist-5k"]):
        ranks = job(2, [*options, *asked, "--max-steps=2"])
        assert [run.resumed_from for run in all_done(ranks)] == [2, 2]
        assert {rank.options.dataset for rank in ranks} == {"mnist-5k"}
        assert result_of(run_dir)["dataset"] == "mnist-5k"


def test_other_data_than_a_run_was_begun_with_are_refused(run_dir: Path) -> None:
    stopped_after(run_dir, 2)
    assert state_of(run_dir)["requested_dataset"] == "mnist"
    text = refused(job(2, options_for(run_dir, "--dataset=mnist-5k")), ConfigError, 2)
    assert "--dataset mnist in the checkpoint, mnist-5k now" in text


# --- what is due -----------------------------------------------------------------------------------------------------

CADENCES: list[tuple[list[str], list[int], list[int], list[int]]] = [  # options; steps of log, test, save
    (["--log-every=1", "--checkpoint-every=0"], list(range(1, 13)), [4, 8, 12], [4, 8, 12]),
    (["--log-every=100", "--checkpoint-every=0"], [4, 8, 12], [4, 8, 12], [4, 8, 12]),
    (["--log-every=5", "--checkpoint-every=0"], [4, 5, 8, 10, 12], [4, 8, 12], [4, 8, 12]),
    (["--log-every=100", "--checkpoint-every=3"], [3, 4, 6, 8, 9, 12], [4, 8, 12], [3, 4, 6, 8, 9, 12]),
    (["--log-every=100", "--checkpoint-every=100"], [4, 8, 12], [4, 8, 12], [4, 8, 12]),
    (["--log-every=100", "--checkpoint-every=1"], list(range(1, 13)), [4, 8, 12], list(range(1, 13))),
    (["--log-every=100", "--checkpoint-every=0", "--max-steps=6"], [4, 6], [4], [4, 6]),
    (["--log-every=100", "--checkpoint-every=0", "--max-steps=8"], [4, 8], [4, 8], [4, 8]),
    (["--log-every=2", "--checkpoint-every=3", "--max-steps=5"], [2, 3, 4, 5], [4], [3, 4, 5]),
    (["--log-every=1", "--checkpoint-every=0", "--max-steps=99", "--epochs=1"], [1, 2, 3, 4], [4], [4]),
    (
        ["--log-every=100", "--checkpoint-every=0", "--evaluate-every=3"],
        [3, 4, 6, 8, 9, 12],
        [3, 4, 6, 8, 9, 12],
        [4, 8, 12],
    ),
    (["--log-every=5", "--checkpoint-every=0", "--keep-best", "--max-steps=6"], [4, 5, 6], [4, 6], [4, 6]),
    (
        ["--log-every=100", "--checkpoint-every=0", "--keep-best", "--evaluate-every=3", "--max-steps=7"],
        [3, 4, 6, 7],
        [3, 4, 6, 7],
        [3, 4, 6, 7],
    ),
    (["--log-every=1", "--checkpoint-every=1", "--epochs=0"], [], [], []),
    (["--log-every=1", "--checkpoint-every=1", "--max-steps=0"], [], [], []),
]


@pytest.mark.parametrize(("options", "logged", "tested", "saved"), CADENCES)
def test_logs_evaluations_and_saves_are_due_at_their_steps_on_all_ranks(
    run_dir: Path, options: list[str], logged: list[int], tested: list[int], saved: list[int]
) -> None:
    ranks = job(2, ["--run-dir", str(run_dir), "--keep-checkpoints=99", *options])
    (run, _) = all_done(ranks)
    wanted = {step: (step in logged, step in tested, step in saved) for step in range(1, run.last_step + 1)}
    assert [{step: actions[1:] for step, actions in rank.actions.items()} for rank in ranks] == [wanted, wanted]
    assert all(actions.sync for rank in ranks for step, actions in rank.actions.items() if actions.log or step == 1)
    assert [line["step"] for line in steps_of(run_dir)] == logged
    assert [line["step"] for line in steps_of(run_dir) if "test_loss" in line] == tested
    assert checkpoints(run_dir) == [f"step-{step:08d}" for step in saved]


class ListLoader:
    """A loader of a list. `load_state_dict` stores the state, or drops it if ``resumes`` is false."""

    def __init__(self, batches: list[int], resumes: bool = True) -> None:
        self._batches = batches
        self._resumes = resumes
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state if self._resumes else {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (ListLoader([7], resumes=False), "run.batches needs a loader that resumes"),
        (ListLoader([]), "the loader has no batches"),
        (ListLoader([7]), "step 0 was not counted: call run.after_step after each update"),
    ],
)
def test_a_loop_that_would_never_end_or_not_resume_is_refused(run_dir: Path, loader: ListLoader, problem: str) -> None:
    (run,) = all_done(job(1, options_for(run_dir)))
    run.progress.step = 0
    with pytest.raises((ValueError, RuntimeError), match=problem):
        list(run.batches(loader))


def test_six_syncs_fit_into_the_grace(run_dir: Path) -> None:
    """With steps of 0.5 s and a grace of 30 s, ranks exchange stop requests every 10 steps and at log lines."""
    ((run,), step) = all_done(job(1, options_for(run_dir, "--grace=30", "--log-every=1000"))), STEPS
    run.step_sync.apply(step, Totals(seconds_per_step=0.5))
    due = [run.actions(step + k) for k in range(1, 31)]
    assert [actions.sync for actions in due] == [actions.log or k >= 10 for k, actions in enumerate(due, start=1)]
    assert not all(actions.log for actions in due[9:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_a_signal_to_one_rank_stops_all_at_a_step_that_is_saved(
    run_dir: Path, tmp_path: Path, number: signal.Signals, at: int
) -> None:
    """The test sets the stop request of each rank itself, because handlers run in the main thread only."""
    reference = all_done(job(3, [f"--run-dir={tmp_path / 'whole'}", "--log-every=5"]))
    ranks: list[Rank] = []

    def asked(rank: int, done: int, model: Model) -> None:
        if (rank, done) == (1, at):
            run = ranks[1].run
            assert run
            run.stop_request.number = number

    found = job(3, [f"--run-dir={run_dir}", "--log-every=5", "--grace=1e-6"], Faults(after_update=asked), ranks=ranks)
    assert [type(rank.error) for rank in found] == [Stopped] * 3
    assert {rank.error.exit_code for rank in found if isinstance(rank.error, Stopped)} == {128 + number}
    assert checkpoints(run_dir)[-1] == f"step-{at:08d}"
    done = all_done(job(3, [f"--run-dir={run_dir}", "--log-every=5"]))
    assert {run.resumed_from for run in done} == {at}
    assert done[0].recorder.result["weights_sha256"] == reference[0].recorder.result["weights_sha256"]
    steps = [line["step"] for line in steps_of(run_dir)]
    assert steps == sorted(set(steps))


def test_a_stop_of_ranks_without_their_launcher_is_a_failure(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that lost a process sends SIGTERM to the other ranks. They save the step, and a restart may resume."""
    ranks: list[Rank] = []

    def asked(rank: int, done: int, model: Model) -> None:
        if done == 5:
            for each in ranks:
                assert each.run
                monkeypatch.setattr(each.run.monitor, "launcher_died", lambda: True)
                each.run.stop_request.number = signal.SIGTERM

    found = job(2, [f"--run-dir={run_dir}", "--log-every=5"], Faults(after_update=asked), ranks=ranks)
    assert [rank.error.is_final for rank in found if isinstance(rank.error, Stopped)] == [False] * 2
    assert checkpoints(run_dir)[-1] == "step-00000005"


def test_a_checkpoint_is_never_newer_on_the_disk_than_the_metrics(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = 0
    fsync = os.fsync
    seen = list[tuple[int, bool]]()

    def record(descriptor: int) -> None:
        nonlocal synced
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == "metrics.jsonl":
            synced = json.loads(path.read_text().splitlines()[-1]).get("step", 0)
        if path.name == "manifest.json":
            step = int(path.parent.name[len(".step-") : -len(".tmp")])
            seen.append((step, synced >= step))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    all_done(job(2, options_for(run_dir, "--epochs=1")))
    assert seen == [(2, True), (4, True)]


def test_after_a_resume_the_same_is_due_as_without(run_dir: Path, tmp_path: Path) -> None:
    options = ["--log-every=3", "--checkpoint-every=5"]
    undisturbed = job(2, options_for(tmp_path / "undisturbed", *options))
    stopped_after(run_dir, 7, *options)
    ranks = job(3, options_for(run_dir, *options))
    all_done(ranks)
    assert ranks[0].run is not None
    assert ranks[0].run.first_step == 5
    wanted = {step: actions for step, actions in undisturbed[0].actions.items() if step > 5}
    assert [rank.actions for rank in ranks] == [wanted] * 3
    the_same(run_dir, tmp_path / "undisturbed")


def test_ranks_communicate_about_the_run_at_its_restore_its_checkpoints_and_its_end_alone(run_dir: Path) -> None:
    for _ in range(2):  # a new run, then a resumed run
        for rank in job(2, options_for(run_dir, "--max-steps=5", "--epochs=9", "--checkpoint-every=0")):
            steps = len(rank.actions)
            rank.done  # noqa: B018
            groups = len(rank.loaded and rank.loaded[0])
            without = {"start": 0, "report": 0, "finish": 1, "restore": 1 + groups}
            syncs = sum(actions.sync for actions in rank.actions.values())
            counted = {"after_step": 0, "sync": syncs, "log_metrics": 0, "save": 2}
            assert rank.exchanges == without | (counted if steps else {})


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


def samples(step: int) -> list[int]:
    """Return the indices of the samples in the global batch of ``step``. Steps and samples count from 0."""
    return [int(sample) for sample in GlobalBatches(threads.TRAINING, 6, 1).indices(step)]


def mean_loss(steps: range) -> float:
    losses = [loss_of(sample, step) for step in steps for sample in samples(step)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_a_line_says_what_happened_whatever_the_number_of_ranks(run_dir: Path, world_size: int) -> None:
    ranks = job(world_size, options_for(run_dir))
    all_done(ranks)
    assert (
        steps_of(run_dir)
        == [
            {
                "step": step + 1,
                "epoch": step // EPOCH,
                "samples_seen": step // EPOCH * threads.TRAINING + min((step % EPOCH + 1) * 6, threads.TRAINING),
                "loss": mean_loss(range(step, step + 1)),  # the mean over all ranks, before the update
                **({name: line[name] for name in ("test_loss", "test_accuracy", "test_examples")} if tested else {}),
            }
            for step, line in enumerate(lines_of(run_dir)[1:])
            for tested in [(step + 1) % EPOCH == 0]
        ]
    )
    assert all(line["samples_per_second"] > 0 for line in lines_of(run_dir)[1:])
    assert [line["test_examples"] for line in steps_of(run_dir)[EPOCH - 1 :: EPOCH]] == [threads.TEST] * 3
    for rank in ranks:  # all ranks get the same lines, except the speed, which each rank measures
        printed = [{name: value for name, value in line.items() if name != "samples_per_second"} for line in rank.lines]
        assert printed == steps_of(run_dir)


@pytest.mark.parametrize("log_every", [1, 3, 100])
@pytest.mark.parametrize(
    ("max_steps", "counted"), [(12, range(8, 12)), (10, range(8, 10)), (4, range(4)), (1, range(1))]
)
def test_the_train_loss_is_the_mean_over_the_last_epochs_samples_or_those_seen(
    run_dir: Path, log_every: int, max_steps: int, counted: range
) -> None:
    all_done(
        job(3, options_for(run_dir, f"--log-every={log_every}", f"--max-steps={max_steps}", "--checkpoint-every=0"))
    )
    assert result_of(run_dir)["train_loss"] == mean_loss(counted)


@pytest.mark.parametrize("kills", [[1], [2], [3], [4], [5], [8], [11], [3, 3, 7], [5, 6, 9, 11]])
def test_a_run_that_was_killed_leaves_the_lines_and_sums_of_an_undisturbed_one(
    run_dir: Path, tmp_path: Path, kills: list[int]
) -> None:
    """Each start has another world size, and repeats the updates since the last checkpoint."""
    undisturbed = tmp_path / "undisturbed"
    all_done(job(2, options_for(undisturbed, "--log-every=2", "--checkpoint-every=3")))
    for start, kill in enumerate(kills):
        stopped_after(run_dir, kill, "--log-every=2", "--checkpoint-every=3", ranks=1 + start % 3)
    all_done(job(1 + len(kills) % 3, options_for(run_dir, "--log-every=2", "--checkpoint-every=3")))
    the_same(run_dir, undisturbed)
    resumed = [line["resumed"]["step"] for line in lines_of(run_dir) if "resumed" in line]
    saved = [3, 4, 6, 8, 9]
    assert resumed == sorted(max(step for step in saved if step <= kill) for kill in kills if kill >= 3)


def test_right_answers_are_counted_at_any_number_of_ranks_and_through_a_kill(run_dir: Path, console: Console) -> None:
    """Log lines have the accuracy since the previous line; the console has the accuracy since the epoch began.

    The ranks crash in the middle of an epoch.
    """
    arguments = options_for(run_dir, "--log-every=3", "--checkpoint-every=3")
    for rank in job(2, arguments, crash(8), app=COUNTING):
        assert isinstance(rank.error, CrashError)
    all_done(job(3, arguments, app=COUNTING))
    hits = {step: [threads.is_hit(sample, step) for sample in samples(step)] for step in range(STEPS)}

    def share(steps: range) -> float:
        counted = [hit for step in steps for hit in hits[step]]
        return sum(counted) / len(counted)

    lines = steps_of(run_dir)
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 12]
    assert [line["accuracy"] for line in lines] == [
        share(range(begin, end)) for begin, end in pairwise([0, 3, 4, 6, 8, 9, 12])
    ]
    assert [line["accuracy_twice"] for line in lines] == [2 * line["accuracy"] for line in lines]
    assert "accuracy_twice" not in result_of(run_dir)
    message = dict(re.findall(r"^epoch (\d)/.*  train accuracy (\S+)  test loss", console.out.getvalue(), re.MULTILINE))
    epochs = {str(epoch + 1): range(epoch * EPOCH, (epoch + 1) * EPOCH) for epoch in range(3)}
    assert message == {epoch: f"{share(steps):.4f}" for epoch, steps in epochs.items()}


def test_the_header_says_what_made_the_numbers(run_dir: Path) -> None:
    arguments = options_for(run_dir, "--seed=3")
    world = {"launcher": "torchrun", "node_count": 1}
    for rank in job(2, arguments, crash(3), world=world):
        assert isinstance(rank.error, CrashError)
    all_done(job(2, arguments, world=world))
    header = lines_of(run_dir)[0]
    resumed = lines_of(run_dir)[3]["resumed"]
    assert resumed.pop("step") == 2
    for found in (header, resumed):
        expected = {"app", "time", "python", "machine", "host", "numpy", "world", "options", "command"}
        assert found.keys() == {*expected, "dataset_fingerprint"}
        assert (found["app"], found["numpy"]) == ("toy", np.__version__)
        assert found["world"] == dataclasses.asdict(World(0, 2, launcher="torchrun", node_count=1))
        wanted = vars(parse(*arguments)) | {"run_dir": str(run_dir), "data_dir": "data", "dataset": "mnist"}
        assert found["options"] == wanted  # without attributes of the parser


def test_a_loss_that_is_no_number_ends_every_rank_and_names_the_learning_rate(run_dir: Path) -> None:
    for scale in (np.nan, np.inf):
        faults = Faults(loss_scale={6: scale})
        for rank in job(3, options_for(run_dir, "--no-resume"), faults):
            assert isinstance(rank.error, RetryableError)
            assert str(rank.error) == f"at step 7 the loss is {scale}: lower --lr, now 1.0, {ONCE}"
        assert [line["step"] for line in steps_of(run_dir)] == [1, 2, 3, 4, 5, 6]
        assert checkpoints(run_dir)[-1] == "step-00000006"


def test_a_loss_that_is_no_number_twice_at_one_step_is_not_tried_again(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case is one start of a job: a flipped bit does not recur, but a wrong learning rate does."""
    all_done(job(2, options_for(tmp_path / "undisturbed")))
    message = f"at step 7 the loss is nan: lower --lr, now 1.0, {ONCE}"
    for start, (step, kind, words) in enumerate(
        [
            (7, RetryableError, message),
            (9, RetryableError, message.replace("step 7", "step 9")),  # another step counts as another failure
            (7, RetryableError, message),
            (
                7,
                NonRetryableError,
                "at step 7 the loss is nan: lower --lr, now 1.0; the same happened in an earlier start",
            ),
        ]
    ):
        monkeypatch.setenv("SAMESTEP_RESTARTS", str(start))
        if start == 2:
            shutil.rmtree(run_dir / "checkpoints" / "step-00000008")
        for rank in job(3, options_for(run_dir), Faults(loss_scale={step - 1: np.nan})):
            assert type(rank.error) is kind, rank.error
            assert str(rank.error) == words
    monkeypatch.setenv("SAMESTEP_RESTARTS", "0")  # the user starts the job again
    for rank in job(3, options_for(run_dir), Faults(loss_scale={6: np.nan})):
        assert isinstance(rank.error, RetryableError)
    monkeypatch.setenv("SAMESTEP_RESTARTS", "1")
    all_done(job(3, options_for(run_dir)))
    the_same(run_dir, tmp_path / "undisturbed")


def test_a_loss_that_was_no_number_between_two_lines_is_noticed_at_the_second(run_dir: Path) -> None:
    """One loss is NaN or infinite, and the next is finite. The mean over the epoch would be NaN or infinite."""
    for scale in (np.nan, np.inf):
        faults = Faults(loss_scale={4: scale})
        for rank in job(2, options_for(run_dir, "--no-resume", "--log-every=3", "--checkpoint-every=0"), faults):
            assert isinstance(rank.error, RetryableError), rank.error
            assert str(rank.error) == f"at step 6 the loss before it is {scale}: lower --lr, now 1.0, {ONCE}"
        assert [line["step"] for line in steps_of(run_dir)] == [3, 4]
        assert checkpoints(run_dir) == ["step-00000004"]


def test_a_test_loss_that_is_no_number_is_no_result(run_dir: Path, console: Console) -> None:
    """No later loss shows the effect of the last update, and NaN in result.json would be invalid JSON."""

    def after_update(rank: int, done: int, model: Model) -> None:
        if done == max_steps:
            model.groups["model"]["w"][...] = np.nan

    for max_steps in (5, 8):  # within an epoch, and at its end
        options = options_for(run_dir, "--no-resume", f"--max-steps={max_steps}")
        for rank in job(2, options, Faults(after_update=after_update)):
            assert isinstance(rank.error, RetryableError), rank.error
            assert str(rank.error) == f"at step {max_steps} the test loss is nan: lower --lr, now 1.0, {ONCE}"
        assert "NaN" not in (run_dir / "metrics.jsonl").read_text()
        assert "step-00000008" not in checkpoints(run_dir)  # no checkpoint follows a refused evaluation
    assert not (run_dir / "result.json").exists()
    assert not (run_dir / "model.safetensors").exists()
    assert "RESULT" not in console.out.getvalue()


@pytest.mark.parametrize("options", [["--keep-best"], ["--max-steps=6"]])
def test_a_test_loss_that_overflows_again_after_a_restart_is_null(
    run_dir: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Batch normalization can overflow twice; a flipped bit does not recur. The second overflow is recorded as null."""
    last = 6 if "--max-steps=6" in options else STEPS
    all_done(job(2, options_for(tmp_path / "undisturbed", *options)))
    evaluate = threads.evaluate

    def overflow(model: Model, *others: Any) -> dict[str, Any]:
        young = int(model.groups["model"]["updates"]) < 12
        return {**evaluate(model, *others), **({"test_loss": math.inf} if young else {})}

    monkeypatch.setattr(threads, "evaluate", overflow)
    for rank in job(2, options_for(run_dir, *options)):
        assert str(rank.error) == f"at step 4 the test loss is inf: lower --lr, now 1.0, {ONCE}"
    assert checkpoints(run_dir) == ["step-00000002"]
    monkeypatch.setenv("SAMESTEP_RESTARTS", "1")
    for run in all_done(job(2, options_for(run_dir, *options))):
        assert run.eval_metrics.get("test_loss") is None or last > 6
    words = "batch normalization's running statistics: lower --lr, or raise --global-batch-size"
    (line, _) = console.warnings()  # one warning per rank
    assert (
        line
        == f"warning: at step 4 the test loss is NaN or infinite, reported as null: activations overflow with {words}"
    )
    tested = {line["step"]: line["test_loss"] is None for line in steps_of(run_dir) if "test_loss" in line}
    assert tested == ({4: True} if last == 6 else {4: True, 8: True, 12: False})
    result = result_of(run_dir)
    expected = result_of(tmp_path / "undisturbed")
    assert (result["test_loss"] is None) == (last == 6)
    assert [result[name] for name in ("weights_sha256", "test_accuracy", "train_loss")] == [
        expected[name] for name in ("weights_sha256", "test_accuracy", "train_loss")
    ]
    assert "Infinity" not in (run_dir / "metrics.jsonl").read_text() + (run_dir / "result.json").read_text()
    all_done(job(2, options_for(run_dir, *options)))  # a finished run evaluates again, without an error


def test_weights_that_are_no_numbers_twice_are_no_result(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN weights never become finite again, unlike the running statistics of batch normalization."""

    def after_update(rank: int, done: int, model: Model) -> None:
        if done == 6:
            model.groups["model"]["w"][...] = np.nan

    for start, kind in enumerate([RetryableError, NonRetryableError]):
        monkeypatch.setenv("SAMESTEP_RESTARTS", str(start))
        for rank in job(2, options_for(run_dir, "--max-steps=6"), Faults(after_update=after_update)):
            assert type(rank.error) is kind, rank.error
    assert str(rank.error) == "at step 6 weights are NaN or infinite: lower --lr"
    assert not (run_dir / "result.json").exists()


# --- who holds the others up ------------------------------------------------------------------------------------------


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Faults]:
    """Fake the clock. Return a function that makes faults: a phase lasts 1 ms plus ``more(rank, step)[phase]`` s."""
    clock = threading.local()
    monkeypatch.setattr(time, "perf_counter", lambda: getattr(clock, "now", 0.0))

    def faults(more: Callable[[int, int], dict[str, float]], at: int = -1) -> Faults:
        def spend(rank: int, step: int, phase: str) -> None:
            clock.now = getattr(clock, "now", 0.0) + 0.001 + more(rank, step).get(phase, 0.0)

        return dataclasses.replace(crash(at), spend=spend)

    return faults


def test_a_slow_rank_is_named_once_in_each_start(run_dir: Path, console: Console, spend: Callable[..., Faults]) -> None:
    """The report is a warning on the console and a field of the next line of metrics.jsonl."""
    slow = {"input": 0.2}
    options = options_for(run_dir, "--epochs=50", "--log-every=7", "--checkpoint-every=9")
    faults = spend(lambda rank, step: slow if rank == 1 and step >= 20 else {}, at=130)
    assert all(isinstance(rank.error, CrashError) for rank in job(3, options, faults))
    (line,) = [line for line in steps_of(run_dir) if "stragglers" in line]
    assert 20 < line["step"] <= 20 + 50 + 10
    (named,) = line["stragglers"]
    assert (named["rank"], named["phase"], named["others"]) == (1, "input", 0.001)
    (warning,) = console.warnings()
    assert re.fullmatch(
        r"warning: rank 1 is a straggler: 0\.\d{3} s per step in input, the others 0\.001 \(over \d+ steps to step "
        rf"{line['step']}\); reported once",
        warning,
    )
    resumed = spend(lambda rank, step: {"optimizer": 0.2} if rank == 1 else {})
    assert [run.resumed_from for run in all_done(job(3, options, resumed))] == [128] * 3
    assert len(console.warnings()) == 2
    assert "in optimizer" in console.warnings()[1]
    assert len([line for line in steps_of(run_dir) if "stragglers" in line]) == 2


@pytest.mark.parametrize(
    ("world_size", "options", "slow"),
    [
        (1, [], {"input": 0.2}),
        (2, ["--straggler=0"], {"input": 0.2}),
        (2, ["--straggler=80"], {"input": 0.2}),
        (2, [], {"waiting": 0.2}),
        (7, [], {"input": 0.2}),  # more ranks than samples in a batch: the rank without samples is fast
    ],
)
def test_no_rank_is_named_if_none_is_slow_or_straggler_is_0(
    run_dir: Path, console: Console, spend: Callable[..., Faults], world_size: int, options: list[str], slow: Any
) -> None:
    all_done(
        job(
            world_size,
            options_for(run_dir, "--epochs=20", *options),
            spend(lambda rank, step: slow if not rank else {}),
        )
    )
    assert not console.warnings()
    assert not [line for line in steps_of(run_dir) if "stragglers" in line]


def test_the_time_between_steps_is_in_no_phase(spend: Callable[..., Faults], monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 12.0, 13.0, 17.0, 100.0, 101.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    timer = StepTimer()
    with timer.phase(INPUT):
        pass
    timer.mark(COMPUTE)
    timer.mark(COMPUTE)  # a second gradient
    timer.mark(COMMUNICATION)
    with timer.phase(OPTIMIZER):
        pass
    assert timer.pop() == [10.0, 3.0, 4.0, 1.0]
    assert timer.pop() == [0.0, 0.0, 0.0, 0.0]


# --- what ranks compare ----------------------------------------------------------------------------------------------


def flip(array: np.ndarray[Any, Any], bit: int = 0) -> None:
    """Flip one bit in place; ``bit`` counts from the lowest bit of the last byte."""
    content = bytearray(array.tobytes())
    content[-1 - bit // 8] ^= 1 << bit % 8
    array[...] = np.frombuffer(bytes(content), array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    ("group", "name", "bit", "differing", "who"),
    [
        ("model", "w", 0, [1], "rank 1 differs from all others"),
        ("model", "w", 24, [2], "rank 2 differs from all others"),
        ("model", "updates", 7, [1, 2], "rank 0 differs from all others"),  # two ranks agree, so rank 0 counts as wrong
        ("optimizer", "w.momentum", 6, [1], "rank 1 differs from all others"),
        ("optimizer", "w.momentum", 25, [0], "rank 0 differs from all others"),
    ],
)
def test_replicas_that_differ_are_never_saved(
    run_dir: Path, tmp_path: Path, group: str, name: str, bit: int, differing: list[int], who: str
) -> None:
    all_done(job(2, options_for(tmp_path / "undisturbed")))

    def after_update(rank: int, done: int, model: Model) -> None:
        if done == 8 and rank in differing:
            flip(model.groups[group][name], bit)

    for rank in job(3, options_for(run_dir), Faults(after_update=after_update)):
        assert isinstance(rank.error, RetryableError), rank.error
        assert str(rank.error) == f"{who} at step 8, first in {group} {name}: not saved; {AGAIN}"
    assert checkpoints(run_dir) == ["step-00000002", "step-00000004", "step-00000006"]
    assert [run.resumed_from for run in all_done(job(2, options_for(run_dir)))] == [6, 6]
    the_same(run_dir, tmp_path / "undisturbed")


UNKNOWN = ", and without a majority the wrong rank is unknown"


@pytest.mark.parametrize(
    ("held", "who", "proof"),
    [
        ([7, 5], "ranks 0 and 1 differ", UNKNOWN),
        ([5, 5, 7], "rank 2 differs from all others", ""),
        ([7, 5, 5], "rank 0 differs from all others", ""),
        ([5, 6, 7], "the 3 ranks differ", UNKNOWN),
        ([5, 5, 7, 7], "the 4 ranks differ", UNKNOWN),
        ([5, 5, 6, 7], "the 4 ranks differ", UNKNOWN),
        ([7, 5, 5, 6, 5], "ranks [0, 3] differ from all others", ""),
    ],
)
def test_the_diverged_ranks_are_those_outside_the_majority(
    run_dir: Path, held: list[int], who: str, proof: str
) -> None:
    def after_update(rank: int, done: int, model: Model) -> None:
        if done == 8:
            model.groups["model"]["updates"][...] = held[rank]

    for rank in job(len(held), options_for(run_dir), Faults(after_update=after_update)):
        assert isinstance(rank.error, RetryableError), rank.error
        assert str(rank.error) == f"{who} at step 8, first in model updates: not saved{proof}; {AGAIN}"
    assert checkpoints(run_dir)[-1] == "step-00000006"


def test_the_first_array_that_differs_is_named_with_its_ranks_alone(run_dir: Path) -> None:
    def after_update(rank: int, done: int, model: Model) -> None:
        if done == 8 and rank == 1:
            flip(model.groups["model"]["updates"])
        if done == 8 and rank in (1, 2):
            flip(model.groups["optimizer"]["w.momentum"])

    for rank in job(3, options_for(run_dir), Faults(after_update=after_update)):
        assert "rank 1 differs from all others at step 8, first in model updates" in str(rank.error)


@pytest.mark.parametrize(("checkpoint_every", "resumed_from"), [(2, 10), (0, 8)])
def test_a_run_never_resumes_from_weights_that_differ_at_its_end(
    run_dir: Path, tmp_path: Path, checkpoint_every: int, resumed_from: int
) -> None:
    cadence = f"--checkpoint-every={checkpoint_every}"
    all_done(job(2, options_for(tmp_path / "undisturbed", cadence)))

    def before_finish(rank: int, model: Model) -> None:
        if rank == 1:
            flip(model.groups["model"]["w"])

    for rank in job(3, options_for(run_dir, cadence), Faults(before_finish=before_finish)):
        assert isinstance(rank.error, RetryableError), rank.error
        assert str(rank.error) == f"rank 1 differs from all others in the final weights: no result; {AGAIN}"
    assert "unequal-step-00000012" in checkpoints(run_dir)
    assert "step-00000012" not in checkpoints(run_dir)
    assert not (run_dir / "result.json").exists()
    assert not (run_dir / "model.safetensors").exists()
    assert [run.resumed_from for run in all_done(job(2, options_for(run_dir, cadence)))] == [resumed_from] * 2
    the_same(run_dir, tmp_path / "undisturbed")


def test_a_run_whose_only_checkpoint_was_unequal_does_not_silently_begin_anew(run_dir: Path, tmp_path: Path) -> None:
    options = ["--epochs=1", "--checkpoint-every=0"]
    all_done(job(2, options_for(tmp_path / "undisturbed", *options)))
    faults = Faults(before_finish=lambda rank, model: flip(model.groups["model"]["w"]) if rank == 1 else None)
    for rank in job(2, options_for(run_dir, *options), faults):
        assert isinstance(rank.error, RetryableError), rank.error
        assert str(rank.error) == f"ranks 0 and 1 differ in the final weights: no result{UNKNOWN}; {AGAIN}"
    text = refused(job(2, options_for(run_dir, *options)), NonRetryableError, 1)
    assert "is good: unequal-step-00000004: restore one, or start a new run with --no-resume" in text
    all_done(job(2, options_for(run_dir, *options, "--no-resume")))
    the_same(run_dir, tmp_path / "undisturbed")


def test_a_rank_that_waits_alone_fails_in_these_tests(run_dir: Path) -> None:
    def after_update(rank: int, done: int, model: Model) -> None:
        if (rank, done) == (1, 3):
            raise CrashError

    ranks = job(3, options_for(run_dir), Faults(after_update=after_update))
    assert [type(rank.error) for rank in ranks] == [LeftAloneError, CrashError, LeftAloneError]


# --- what came of it -------------------------------------------------------------------------------------------------

RESULT = """
app framework framework_version launcher backend device dtype world_size node_count dataset train_examples epochs steps
global_batch_size seed train_loss test_loss test_accuracy test_examples seconds samples_per_second restarts
resumed_from_step weights_sha256 run_dir
"""


def test_the_result_has_all_that_is_promised(run_dir: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_RESTARTS", "2")
    ranks = job(2, options_for(run_dir), world={"launcher": "torchrun", "node_count": 1, "restart_count": 1})
    all_done(ranks)
    printed = [line for line in console.out.getvalue().splitlines() if line.startswith("RESULT ")]
    assert console.out.getvalue().splitlines()[-1:] == printed  # rank 0 prints the result once, as the last line
    result = json.loads(printed[0].removeprefix("RESULT "))
    assert result == result_of(run_dir)
    assert result.keys() == set(RESULT.split())
    wanted = {
        "app": "toy",
        "framework": "numpy",
        "framework_version": np.__version__,
        "launcher": "torchrun",
        "backend": "threads",
        "device": "cpu",
        "dtype": "float32",
        "world_size": 2,
        "node_count": 1,
        "dataset": "mnist",
        "train_examples": threads.TRAINING,
        "epochs": 3,
        "steps": STEPS,
        "global_batch_size": 6,
        "seed": 1,
        "train_loss": mean_loss(range(8, 12)),
        "test_loss": steps_of(run_dir)[-1]["test_loss"],
        "test_accuracy": 0.5,
        "test_examples": threads.TEST,
        "restarts": 3,  # 2 by the launch script and 1 by the launcher
        "resumed_from_step": None,
        "weights_sha256": checkpoint.weights_sha256(safetensors.numpy.load_file(run_dir / "model.safetensors")),
        "run_dir": str(run_dir),
    }
    assert {name: result[name] for name in wanted} == wanted
    assert result["seconds"] > 0
    assert result["samples_per_second"] > 0
    for rank in ranks:
        assert checkpoint.weights_sha256(rank.model.groups["model"]) == wanted["weights_sha256"]


def test_the_best_is_kept_and_its_weights_are_left(run_dir: Path, tmp_path: Path) -> None:
    """The first of equal evaluations stays the best: step 9 equals step 3, and step 11 is not evaluated."""
    faults = Faults(accuracy={3: 0.75, 4: 0.25, 9: 0.75, 11: 0.875})
    options = ["--keep-best", "--evaluate-every=3", "--keep-checkpoints=1"]
    all_done(job(2, options_for(tmp_path / "undisturbed", *options), faults))
    for at in (5, 11):
        stopped_after(run_dir, at, *options, faults=faults)
    all_done(job(3, options_for(run_dir, *options), faults))
    the_same(run_dir, tmp_path / "undisturbed")
    result = result_of(run_dir)
    assert (result["best_step"], result["best_test_accuracy"]) == (3, 0.75)
    assert checkpoints(run_dir) == ["step-00000003", "step-00000012"]
    best = safetensors.numpy.load_file(run_dir / "model-best.safetensors")
    assert best["updates"] == 3
    assert state_of(run_dir)["best"] == {"step": 3, "test_accuracy": 0.75}


def test_a_run_whose_best_checkpoint_is_damaged_ends_well_without_its_weights(run_dir: Path, console: Console) -> None:
    def after_update(rank: int, done: int, model: Model) -> None:
        if rank == 0 and done == 8:
            checkpoint.finish()
            (run_dir / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"x")

    all_done(job(2, options_for(run_dir, "--keep-best"), Faults(after_update=after_update, accuracy={4: 0.75})))
    assert result_of(run_dir)["best_step"] == 4
    assert not (run_dir / "model-best.safetensors").exists()
    (warning,) = console.warnings()
    assert "no model-best.safetensors: the checkpoint of the best, step 4, is damaged: model.safetensors has" in warning


def test_the_best_outlives_a_start_without_keep_best(run_dir: Path) -> None:
    faults = Faults(accuracy={4: 0.75})
    stopped_after(run_dir, 6, "--keep-best", "--keep-checkpoints=1", faults=faults)
    stopped_after(run_dir, 10, "--keep-checkpoints=1", faults=faults)
    assert "step-00000004" in checkpoints(run_dir)
    all_done(job(2, options_for(run_dir, "--keep-best", "--keep-checkpoints=1"), faults))
    assert result_of(run_dir)["best_step"] == 4
    assert safetensors.numpy.load_file(run_dir / "model-best.safetensors")["updates"] == 4
    all_done(job(2, options_for(run_dir, "--no-resume")))
    (aside,) = run_dir.glob("earlier-*")
    assert (aside / "model-best.safetensors").exists()
    assert not (run_dir / "model-best.safetensors").exists()


def test_only_to_evaluate_leaves_the_run_as_it_is(run_dir: Path, tmp_path: Path, console: Console) -> None:
    stopped_after(run_dir, 6)
    (run_dir / "checkpoints" / "step-00000099").mkdir()  # a damaged checkpoint
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "log"}
    ranks = job(3, options_for(run_dir, "--evaluate-only"))
    assert [(run.first_step, run.last_step) for run in all_done(ranks)] == [(6, 6)] * 3
    after = {path for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "log"}
    assert after - before.keys() == {run_dir / "evaluation.json"}
    assert {path: path.read_bytes() for path in before if path.name != ".lock"}.items() <= before.items()
    printed = json.loads(console.out.getvalue().splitlines()[-1].removeprefix("RESULT "))
    assert printed == json.loads((run_dir / "evaluation.json").read_text())
    assert (printed["steps"], printed["test_examples"], printed["samples_per_second"]) == (6, threads.TEST, 0)
    all_done(job(2, options_for(run_dir)))
    all_done(job(2, options_for(tmp_path / "undisturbed")))
    the_same(run_dir, tmp_path / "undisturbed")


def test_weights_can_be_evaluated_alone_but_not_nothing(run_dir: Path, tmp_path: Path) -> None:
    all_done(job(2, options_for(run_dir)))
    weights = run_dir / "model.safetensors"
    all_done(job(2, options_for(tmp_path / "other", "--evaluate-only", f"--init-from={weights}")))
    found = json.loads((tmp_path / "other" / "evaluation.json").read_text())
    assert (found["steps"], found["weights_sha256"]) == (0, result_of(run_dir)["weights_sha256"])
    assert found["test_loss"] == result_of(run_dir)["test_loss"]
    (rank,) = job(1, options_for(tmp_path / "empty", "--evaluate-only"))
    assert isinstance(rank.error, ConfigError)
    assert "has no checkpoint" in str(rank.error)
    assert not (tmp_path / "empty").exists()
    for options, message in (
        ([], "needs weights: name a run"),
        (["--run-dir=x", "--no-resume"], "--no-resume would clear"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse("--evaluate-only", *options)


def test_an_evaluation_is_one_line_on_the_console(run_dir: Path, console: Console) -> None:
    all_done(job(1, options_for(run_dir)))
    lines = [line for line in console.out.getvalue().splitlines() if line.startswith("epoch ")]
    message = [re.sub(r"  \d+\.\d s  ", "  SECONDS  ", line) for line in lines]
    tested = [line for line in steps_of(run_dir) if "test_loss" in line]
    means = [mean_loss(range(begin, begin + EPOCH)) for begin in range(0, STEPS, EPOCH)]
    assert message == [
        f"epoch {epoch}/3  step {epoch * EPOCH}  SECONDS  train loss {mean:.4f}  test loss {line['test_loss']:.4f}  "
        "test accuracy 0.5000"
        for epoch, (mean, line) in enumerate(zip(means, tested), start=1)
    ]


def test_a_finished_run_reports_again_and_trains_nothing(run_dir: Path, console: Console) -> None:
    all_done(job(2, options_for(run_dir)))
    lines = steps_of(run_dir)
    saved = checkpoints(run_dir)
    first = result_of(run_dir)
    for name in ("result.json", "model.safetensors"):
        (run_dir / name).unlink()
    ranks = job(3, options_for(run_dir))
    for rank, run in zip(ranks, all_done(ranks)):
        assert run.first_step == run.last_step == STEPS
        assert rank.actions == {}
    assert (steps_of(run_dir), checkpoints(run_dir)) == (lines, saved)
    again = result_of(run_dir)
    changed = {"world_size", "seconds", "samples_per_second", "resumed_from_step"}
    assert {name for name in first if again[name] != first[name]} <= changed
    assert again["resumed_from_step"] == STEPS
    assert again["seconds"] > 0
    assert (run_dir / "model.safetensors").exists()


def test_a_finished_run_may_be_given_more_epochs(run_dir: Path, tmp_path: Path) -> None:
    all_done(job(2, options_for(tmp_path / "undisturbed")))
    all_done(job(2, options_for(run_dir, "--epochs=2")))
    assert [run.resumed_from for run in all_done(job(3, options_for(run_dir)))] == [8, 8, 8]
    the_same(run_dir, tmp_path / "undisturbed")


def test_a_resumed_run_that_is_past_its_last_step_stays_where_it_is(run_dir: Path) -> None:
    stopped_after(run_dir, 6)
    assert [(run.first_step, run.last_step) for run in all_done(job(2, options_for(run_dir, "--max-steps=3")))] == [
        (6, 6)
    ] * 2
    assert result_of(run_dir)["steps"] == 6


def test_the_seconds_of_a_run_are_those_of_all_its_starts(run_dir: Path) -> None:
    stopped_after(run_dir, 6)
    found = checkpoint.newest(run_dir, lambda text: None)
    assert found is not None
    assert found.state["seconds"] > 0
    groups = {group: found.arrays(group) for group in found.contents}
    checkpoint.save(run_dir, "toy", 6, groups, {**found.state, "seconds": 5000.0}, found.resume_invariants, keep=3)
    checkpoint.finish()
    all_done(job(2, options_for(run_dir)))
    assert 5000 < result_of(run_dir)["seconds"] < 5000 + threads.LIMIT


def test_a_checkpoint_says_what_a_resume_must_repeat(run_dir: Path) -> None:
    ranks = job(2, options_for(run_dir, "--momentum=0.25", "--keep-checkpoints=2"))
    all_done(ranks)
    assert checkpoints(run_dir) == ["step-00000010", "step-00000012"]
    found = checkpoint.newest(run_dir, lambda text: None)
    assert found is not None
    assert found.resume_invariants == resume_invariants(ranks[0].options)
    assert found.resume_invariants["momentum"] == 0.25
    wanted = {"requested_dataset", "dataset_fingerprint", "epoch_loss_sum", "epoch_correct", "train_loss", "seconds"}
    assert found.state.keys() == {*wanted, "train_examples", "threads", "metadata"}
    assert (found.state["epoch_loss_sum"], found.state["train_loss"]) == (0.0, mean_loss(range(8, 12)))


def test_a_program_that_leaves_its_loop_reports_the_steps_that_it_took(run_dir: Path) -> None:
    all_done(job(2, options_for(run_dir), Faults(leaves_after=7)))
    result = json.loads((run_dir / "result.json").read_text())
    assert result["steps"] == 7


# --- who is alive ----------------------------------------------------------------------------------------------------


def test_heartbeats_after_a_resume_begin_at_the_restored_step(run_dir: Path) -> None:
    for rank in job(2, options_for(run_dir), crash(7)):
        assert rank.first_beat is not None
        assert (json.loads(rank.first_beat)["step"], json.loads(rank.first_beat)["updates"]) == (1, 1)
    for rank in job(3, options_for(run_dir)):
        rank.done  # noqa: B018
        assert rank.first_beat is not None
        assert (json.loads(rank.first_beat)["step"], json.loads(rank.first_beat)["updates"]) == (7, 1)


def test_the_processor_has_a_name_of_one_line() -> None:
    assert processor()
    assert processor().isprintable()
