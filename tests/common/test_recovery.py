"""Test that killed, hung, stopped and damaged runs end with the weights of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from harness import Harness, Job, Shape, evaluation, faulty, last_step, losses, options_of, relative_difference
from numpy.typing import NDArray
from processes import parent
from samestep import checkpoint
from samestep.sharded import storage
from samestep.sharded.tensors import TensorShard
from samestep.sharding import GlobalBatches
from samestep.stop import STOP_SIGNALS


def check_same_end(harness: Harness, outcome: Any, n: int, reference: dict[str, Any]) -> dict[str, Any]:
    """Check that a run succeeded with the reference's weights and has each step once, and return its result."""
    result = harness.checked(outcome, n)
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert evaluation(result) == evaluation(reference)
    assert result["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-6)
    curve = losses(Path(result["run_dir"]))
    expected = losses(Path(reference["run_dir"]))
    assert relative_difference(curve, expected) < 1e-6
    return result


# --- kills at random steps -----------------------------------------------------------------------------------------


@pytest.mark.soak  # the quick tests kill a rank (test_one_run_survives_every_fault)
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_killed_at_a_random_step_changes_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, n: int, table: list[str]
) -> None:
    reference = undisturbed(n)
    chance = random.Random(n)
    runs = amount(soak, few=1, many=harness.app.kills)
    for i in range(runs):
        job = harness.start(n, *harness.app.small, run_dir=harness.folder / str(i))
        landed = job.wait_for_step(chance.randrange(1, reference["steps"] - Shape.of(reference).every - 1))
        os.kill(job.ranks()[chance.randrange(n)], signal.SIGKILL)
        result = check_same_end(harness, job.finish(), n, reference)
        assert result["restarts"] == 1, f"killed at step {landed}"
    table.append(f"| {harness.app.name} | {n} | SIGKILL of a random rank at a random step | {runs} | {runs} |")


@pytest.mark.soak  # the quick tests kill the script or the launcher (test_one_run_survives_every_fault)
@pytest.mark.parametrize("victim", ["the launcher", "the script", "all processes"])
def test_a_killed_launcher_or_script_changes_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, victim: str, table: list[str]
) -> None:
    reference = undisturbed(2)
    chance = random.Random(victim)
    runs = amount(soak, few=1, many=harness.app.kills // 2)
    for i in range(runs):
        run_dir = harness.folder / str(i)
        job = harness.start(2, *harness.app.small, run_dir=run_dir)
        job.wait_for_step(chance.randrange(1, reference["steps"] - Shape.of(reference).every - 1))
        if victim == "the launcher":
            os.kill(parent(next(iter(job.ranks().values()))), signal.SIGKILL)
        elif victim == "the script":
            job.process.kill()
            job = harness.start(2, *harness.app.small, run_dir=run_dir)  # old ranks may still run
        else:
            harness.kill_all()
            job = harness.start(2, *harness.app.small, run_dir=run_dir)
        # Ranks end about a second after their script was killed, but they may finish the run before.
        result = check_same_end(harness, job.finish(), 2, reference)
        assert (result["resumed_from_step"] or 1) < result["steps"] + (victim == "the script")
    table.append(f"| {harness.app.name} | 2 | SIGKILL of {victim} at a random step | {runs} | {runs} |")


# --- kills at exact moments ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    name: str
    rank: int
    fault: Callable[[Shape], dict[str, Any]]


def written(run: Shape, path: str = "") -> str:
    """Return a pattern of ``path`` in the temporary folder of the first periodic checkpoint of the second epoch."""
    return rf"/\.step-{first_of_second_epoch(run):08d}\.tmp{path}"


def first_of_second_epoch(run: Shape) -> int:
    return (run.epoch // run.every + 1) * run.every


MOMENTS = [
    Moment("in the first step", 1, lambda run: {"step": 0}),
    Moment("in mid-epoch, before any checkpoint of it", 0, lambda run: {"updates": first_of_second_epoch(run) - 1}),
    Moment("exactly at an epoch's end", 0, lambda run: {"updates": run.epoch}),
    Moment("in an evaluation", 1, lambda run: {"evaluating": 2}),
    Moment("before a checkpoint's files", 0, lambda run: {"audit": "os.mkdir", "match": written(run)}),
    Moment("between a checkpoint's files", 0, lambda run: {"audit": "open", "match": written(run, "/optimizer")}),
    Moment("before its manifest", 0, lambda run: {"audit": "open", "match": written(run, "/manifest")}),
    Moment("before its rename", 0, lambda run: {"audit": "os.rename", "match": written(run)}),
    Moment("after its rename", 0, lambda run: {"updates": first_of_second_epoch(run) + 1}),
    Moment("before the final weights", 0, lambda run: {"audit": "open", "match": r"\.model\.safetensors\.tmp$"}),
    Moment("before the result", 0, lambda run: {"audit": "open", "match": r"\.result\.json\.tmp$"}),
]


@pytest.mark.soak  # the quick tests kill a save before each system call (tests/core)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)
def test_a_rank_killed_at_an_exact_moment_changes_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], moment: Moment, table: list[str]
) -> None:
    reference = undisturbed(2)
    fault = {"rank": moment.rank, **moment.fault(Shape.of(reference)), "signal": signal.SIGKILL}
    outcome = harness.run(2, *harness.app.small, **faulty(fault))
    result = check_same_end(harness, outcome, 2, reference)
    assert result["restarts"] == 1
    assert not [path for path in (harness.folder / "run").rglob("*.tmp") if path.parent.name != "log"]
    table.append(f"| {harness.app.name} | 2 | SIGKILL {moment.name} | 1 | 1 |")


# --- stops ---------------------------------------------------------------------------------------------------------


def stopped_at(run_dir: Path, number: int) -> int:
    """Return the step at which the ranks agreed to stop, or 0 if they did not stop.

    Fail unless the newest checkpoint and the last line of metrics.jsonl have this step.
    """
    stops = re.findall(
        r"stopped by (SIG\w+) at step (\d+), which is saved", (run_dir / "log" / "rank-0.log").read_text()
    )
    newest = checkpoint.newest(run_dir, pytest.fail)
    if not stops:
        return 0
    assert newest is not None
    # On INT, MindSpore's compiler sends TERM to its own process.
    assert stops[-1] in [(name, str(newest.step)) for name in (signal.Signals(number).name, "SIGTERM")]
    assert last_step(run_dir) == newest.step
    return newest.step


@dataclass(frozen=True)
class Stop:
    number: signal.Signals
    to: str  # "the script", "the launcher" or "a rank"

    def send(self, job: Job, chance: random.Random) -> None:
        if self.to == "the script":
            os.kill(job.process.pid, self.number)
            return
        ranks = list(job.ranks().values())
        pid = chance.choice(ranks)
        if self.to == "the launcher":
            pid = parent(ranks[0])
        os.kill(pid, self.number)


STOPS = [
    *(Stop(number, to) for to in ("the script", "a rank") for number in STOP_SIGNALS),
    *(Stop(number, "the launcher") for number in (signal.SIGTERM, signal.SIGINT)),
]


def has_come(job: Job, n: int) -> bool:
    """Return whether all ranks have created their Run, and so handle signals."""
    return all(job.alive(rank) for rank in range(n))


def check_stopped(harness: Harness, job: Job, stop: Stop, restarts: int = 0) -> int:
    """Check that the job ended by the signal without errors, and return the step that it saved."""
    outcome = job.finish(limit=60)
    codes = {128 + stop.number}
    if stop == Stop(signal.SIGINT, "a rank") and harness.app.launcher == "msrun":  # MindSpore may send TERM
        codes.add(128 + signal.SIGTERM)
    assert outcome.code in codes, outcome
    assert "Traceback" not in outcome.stderr
    assert restarts or not outcome.errors, outcome
    assert outcome.stderr.count("starting it again") == restarts
    assert not harness.left_running()
    return stopped_at(job.run_dir, stop.number)


@pytest.mark.soak  # the quick tests send one signal (test_one_run_survives_every_fault); tests/core sends the others
def test_a_signal_at_a_random_moment_saves_a_step_and_changes_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, table: list[str]
) -> None:
    """Send signals to the script, a rank or the launcher of 2 and 3 ranks. The launcher may kill its ranks."""
    chance = random.Random(1)
    many = 20
    if "slow" in harness.app.skipped_marks:
        many = 8
    runs = amount(soak, few=2, many=many)
    counts: dict[tuple[str, int], list[int]] = {}
    for i in range(runs):
        stop = STOPS[i % len(STOPS)]
        n = 2 + (i + i // len(STOPS)) % 2
        reference = undisturbed(n)
        run_dir = harness.folder / str(i)
        job = harness.start(n, *harness.app.small, run_dir=run_dir)
        at = 0
        if i == 0:  # as soon as the ranks handle signals
            job.wait_for(partial(has_come, job, n))
        else:
            at = chance.randrange(1, reference["steps"] - Shape.of(reference).every)
            job.wait_for_step(at)
        stop.send(job, chance)
        if stop.to == "the launcher":  # the launcher may kill its ranks, which then restart
            outcome = job.finish()
            assert outcome.code in (0, 128 + signal.SIGTERM, 128 + stop.number), outcome
            saved = 0
            if outcome.code:
                saved = stopped_at(run_dir, outcome.code - 128)
            assert not harness.left_running()
        else:
            saved = check_stopped(harness, job, stop)
            assert saved >= at, (stop, n, at)
        result = check_same_end(harness, harness.run(n, *harness.app.small, run_dir=run_dir), n, reference)
        if stop.to != "the launcher":
            assert result["resumed_from_step"] == (saved or None), (stop, n, at)
        count = counts.setdefault((f"{stop.number.name} to {stop.to}", n), [0, 0])
        count[0] += 1
        count[1] += saved > 0
    table.extend(
        f"| {harness.app.name} | {n} | {what} at a random moment; {saved} saved a step | {runs} | {runs} |"
        for (what, n), (runs, saved) in counts.items()
    )


@pytest.mark.soak  # the quick tests send the signal in each phase, with threads (tests/core)
def test_a_signal_at_an_exact_moment_saves_a_step_and_changes_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], table: list[str]
) -> None:
    """Send TERM in the first step, in an evaluation, and while a checkpoint is written."""
    reference = undisturbed(2)
    saved = 0
    checkpoint_files = {"audit": "open", "match": r"/\.step-\d+\.tmp/optimizer"}
    for rank, moment in ((1, {"step": 0}), (1, {"evaluating": 1}), (0, checkpoint_files)):
        fault = {"rank": rank, **moment, "signal": signal.SIGTERM}
        job = harness.start(2, *harness.app.small, **faulty(fault))
        before = saved
        saved = check_stopped(harness, job, Stop(signal.SIGTERM, "a rank"))
        if moment == {"step": 0}:
            assert saved == 1
        assert saved > before
    result = check_same_end(harness, harness.run(2, *harness.app.small), 2, reference)
    assert result["resumed_from_step"] == saved
    table.append(f"| {harness.app.name} | 2 | SIGTERM in the first step, an evaluation, a checkpoint | 3 | 3 |")


@pytest.mark.soak  # the quick tests start a second job (tests/launch)
def test_a_second_job_on_a_run_dir_waits_and_names_the_first(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The first job runs longer than the second job waits. The second job must not disturb the first."""
    longer = ("--epochs=10000", "--max-steps=10000000")
    reference = undisturbed(1, *longer, "--max-steps=40")
    job = harness.start(1, *harness.app.small, *longer)
    job.wait_for_step(reference["steps"])
    second = harness.run(1, *harness.app.small)
    assert second.code == 2, second
    assert len(second.errors) == 1
    assert any(f"pid {pid}" in second.errors[0] for pid in (job.process.pid, job.alive(0)["pid"]))
    last = last_step(job.run_dir)
    job.wait_for_step(last + 1)
    os.kill(job.process.pid, signal.SIGINT)
    outcome = job.finish(limit=20)
    assert outcome.code == 130
    assert "starting it again" not in outcome.stderr
    curve = losses(job.run_dir)
    expected = losses(Path(reference["run_dir"]))
    assert relative_difference(curve[: len(expected)], expected) < 1e-6


@pytest.mark.soak  # the quick tests stop a rank (test_one_run_survives_every_fault)
@pytest.mark.stall
def test_a_stopped_rank_is_named_and_replaced(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    job = harness.start(2, *harness.app.small, f"--timeout={harness.app.patience}")
    job.wait_for_step(5)
    stopped = job.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    outcome = job.finish()
    assert re.search(silent(stopped, harness.app.launcher), outcome.errors[0]), outcome
    result = check_same_end(harness, outcome, 2, undisturbed(2))
    assert result["restarts"] == 1


def silent(pid: int, launcher: str) -> str:
    """Return a pattern of the line that reports rank 1, process ``pid``, as stopped by a signal.

    With MindSpore, the launch script may report the rank, because the other rank waits longer while it compiles.
    """
    who = rf"rank 1 \({re.escape(os.uname().nodename)}, pid {pid}\)"
    line = rf"{who} last alive at step \d+, silent for \d+ s, stopped by a signal .*, last seen at \w+\.py:\d+ in \w+"
    if launcher == "msrun":
        line += rf"|{who} has written no heartbeat for \d+ s, last alive at step \d+: its process is stopped"
    return line


@pytest.mark.soak  # the quick tests reserve ports for two jobs (tests/launch)
def test_two_jobs_at_once_do_not_disturb_each_other(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    jobs = [harness.start(2, *harness.app.small, run_dir=harness.folder / str(i)) for i in range(2)]
    for job in jobs:
        result = check_same_end(harness, job.finish(), 2, undisturbed(2))
        assert result["restarts"] == 0


# --- one run, and one fault after the other ------------------------------------------------------------------------


def slow_steps(n: int) -> dict[str, str]:
    """Return environment variables that make each step 0.1 s slower, so that tests can inject faults in time."""
    slow = [(rank, "input", 0, 1_000_000) for rank in range(n)]
    return faulty({"slow": slow, "seconds": 0.1, "every_start": True})


@pytest.mark.faults
def test_one_run_survives_every_fault(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Damage a checkpoint, kill ranks or their launcher, hang a rank, and stop the run by a signal.

    The slow tests inject each fault into a separate run. This run gets all faults, because a start is slow. Slow steps
    leave time for each fault on a busy machine. SIGSTOP simulates a machine that hangs or swaps.
    """
    n = 2
    skipped = harness.app.skipped_marks
    reference = undisturbed(n)
    chance = random.Random(n)
    hangs = "stall" not in skipped
    environ = slow_steps(n)
    checkpoints = harness.folder / "run" / "checkpoints"

    options = [*harness.app.small]
    fault = signal.SIGKILL
    if hangs:
        options.append(f"--timeout={harness.app.patience}")
        fault = signal.SIGSTOP
    job = harness.start(n, *options, run_dir=None, **environ)
    newest = job.wait_for(lambda: sorted(checkpoints.glob("step-*"))[1:])[-1]
    flip(sorted(newest.glob("model*.safetensors"))[0])
    victim = job.ranks()[1]
    restarts = 1
    os.kill(victim, fault)
    job.wait_for((checkpoints / f"damaged-{newest.name}").is_dir)
    if hangs:
        assert re.search(silent(victim, harness.app.launcher), (job.run_dir / "log" / "events.jsonl").read_text())
    if hangs or "launcher" not in skipped:
        job.wait_for_step(reference["steps"] // 2)
        second = job.ranks()[chance.randrange(n)]
        if not hangs:
            second = parent(second)
        os.kill(second, signal.SIGKILL)
        restarts = 2
    job.wait_for_step(3 * reference["steps"] // 4)
    stop = Stop(signal.SIGUSR1, "a rank")
    if "core_only" in skipped:
        stop = Stop(signal.SIGTERM, "the script")
    stop.send(job, chance)
    saved = check_stopped(harness, job, stop, restarts)
    assert saved >= 3 * reference["steps"] // 4

    job = harness.start(n, *harness.app.small, run_dir=None, **environ)
    if "core_only" not in skipped:
        job.wait_for_step(saved + 1)
        job.process.kill()
        job.finish()
        job = harness.start(n, *harness.app.small)  # old ranks may still run
    result = check_same_end(harness, job.finish(), n, reference)
    assert result["resumed_from_step"] >= saved


# --- many faults of one run -----------------------------------------------------------------------------------------


def last_to_disturb(result: Mapping[str, Any]) -> int:
    """Return the last step at which a fault still interrupts the run; a later fault might come after the run's end."""
    return int(result["steps"]) - Shape.of(result).every - 1


def wait_for_start(job: Job, before: int) -> None:
    """Wait until a restart has replaced metrics.jsonl, whose inode was ``before``."""
    job.wait_for(lambda: (job.run_dir / "metrics.jsonl").stat().st_ino != before)


@pytest.mark.soak  # the quick tests kill three times (test_one_run_survives_every_fault)
def test_ten_kills_in_a_row_change_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], table: list[str]
) -> None:
    """Kill a rank, all ranks at once, or all processes of the job, soon after the restart by the previous kill."""
    n = 2
    reference = undisturbed(n)
    last = last_to_disturb(reference)
    chance = random.Random(harness.app.name)
    kinds = [
        "a rank",
        "all ranks",
        "a rank",
        "the job",
        "a rank",
        "all ranks",
        "a rank",
        "the job",
        "a rank",
        "all ranks",
    ]
    options = [*harness.app.small, "--max-restarts=20"]
    environ = slow_steps(n)
    while kinds:
        job = harness.start(n, *options, run_dir=harness.folder / str(len(kinds)), **environ)
        step = job.wait_for_step(1)
        while kinds and step < last:
            time.sleep(chance.uniform(0, 0.1))
            before = (job.run_dir / "metrics.jsonl").stat().st_ino
            kind = kinds.pop(0)
            if kind == "the job":
                harness.kill_all()
                job.finish()
                job = harness.start(n, *options, run_dir=job.run_dir, **environ)
            else:
                victims = list(job.ranks().values())
                if kind == "a rank":
                    victims = [chance.choice(victims)]
                for pid in victims:
                    with suppress(ProcessLookupError):  # the launcher may have ended the process
                        os.kill(pid, signal.SIGKILL)
            landed = last_step(job.run_dir)
            wait_for_start(job, before)
            step = job.wait_for_step(landed + 1)
        check_same_end(harness, job.finish(), n, reference)
    table.append(f"| {harness.app.name} | {n} | SIGKILL soon after a restart: rank, all ranks, job | 10 | 10 |")


@pytest.mark.soak  # the quick tests send one TERM (test_one_run_survives_every_fault)
def test_ten_stops_in_a_row_change_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], table: list[str]
) -> None:
    """Send TERM to the script or to a rank soon after each resume."""
    n = 2
    reference = undisturbed(n)
    last = last_to_disturb(reference)
    chance = random.Random(harness.app.name)
    stops = [Stop(signal.SIGTERM, to) for to in ("the script", "a rank")] * 5
    environ = slow_steps(n)
    while stops:
        run_dir = harness.folder / str(len(stops))
        saved = 0
        while stops and saved < last:
            job = harness.start(n, *harness.app.small, run_dir=run_dir, **environ)
            step = job.wait_for_step(saved + 1)
            time.sleep(chance.uniform(0, 0.1))
            stop = stops.pop(0)
            stop.send(job, chance)
            saved = check_stopped(harness, job, stop)
            assert saved >= step
        result = check_same_end(harness, harness.run(n, *harness.app.small, run_dir=run_dir), n, reference)
        assert result["resumed_from_step"] == saved
    table.append(f"| {harness.app.name} | {n} | SIGTERM to the script or a rank soon after a resume | 10 | 10 |")


# --- resuming as another job ---------------------------------------------------------------------------------------


@pytest.mark.soak  # the quick tests compare a plain loop with a resume on 3 ranks
def test_resume_at_other_world_sizes_repeats_no_sample(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool
) -> None:
    """Change the world size in mid-epoch from 2 to 3 and, in a soak, to 1 and 4. Losses and samples stay the same."""
    run = Shape.of(undisturbed(2))
    batch = run.batch
    epoch = run.epoch
    stops = [(n, int(part * epoch)) for n, part in ((2, 0.5), (3, 1.3), (1, 1.9), (4, 2.5))]
    plan = amount(soak, few=stops[:2], many=stops)
    steps = plan[-1][1]
    options = [*harness.app.exact, *harness.app.variants[0], f"{harness.app.batch_option}={batch}"]
    options.append(f"--checkpoint-every={run.every}")
    harness.train(1, *options, f"--max-steps={steps}", run_dir=harness.folder / "undisturbed")
    expected = losses(harness.folder / "undisturbed")
    for n, stop in plan:
        result = harness.train(n, *options, f"--max-steps={stop}")
    assert relative_difference(expected, losses(harness.folder / "run")) < harness.app.tolerance
    if harness.app.batch_option != "--global-batch-size":
        return  # tests/core covers batches of tokens
    seed = result["seed"]
    samples = result["train_examples"]
    per_epoch = GlobalBatches(samples, batch, seed).steps_per_epoch
    for epoch in range(steps // per_epoch):
        taken = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            n = next(n for n, stop in plan if step < stop)
            taken += [GlobalBatches(samples, batch, seed, rank, n).indices(step) for rank in range(n)]
        assert np.array_equal(np.sort(np.concatenate(taken)), np.arange(samples))


@pytest.mark.soak  # the quick tests refuse each such option (tests/core)
def test_a_resume_that_would_take_other_steps_is_refused(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    shutil.copytree(undisturbed(2)["run_dir"], harness.folder / "run")
    kept = snapshot(harness.folder / "run")
    parse = options_of(harness.app.name).parse
    for option in harness.app.resume_invariants:
        outcome = harness.run(2, *harness.app.small, option)
        assert outcome.code == 2, outcome
        assert len(outcome.stderr.splitlines()) == 1
        name = option.partition("=")[0]
        field = name.removeprefix("--").replace("-", "_")
        before = getattr(parse([*harness.app.small]), field)
        now = getattr(parse([*harness.app.small, option]), field)
        assert f"{name} {before} in the checkpoint, {now} now" in outcome.stderr
    assert snapshot(harness.folder / "run") == kept


@pytest.mark.soak  # the quick tests resume with each app's default model and optimizer
def test_a_resume_restores_the_whole_state_of_each_variant(harness: Harness) -> None:
    for i, variant in enumerate(harness.app.variants):
        options = [*harness.app.small, *variant, "--max-steps=9"]
        expected = harness.train(2, *options, run_dir=harness.folder / f"undisturbed-{i}")
        harness.train(2, *options, "--max-steps=4", run_dir=harness.folder / f"{i}")
        result = harness.train(2, *options, run_dir=harness.folder / f"{i}")
        found = result["resumed_from_step"], result["weights_sha256"]
        assert found == (4, expected["weights_sha256"]), variant


@pytest.mark.soak
def test_a_resume_may_change_cadence_and_length(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    assert harness.train(2, *harness.app.small, "--max-steps=3")["steps"] == 3
    horizon = any(option.startswith("--epochs=") for option in harness.app.resume_invariants)
    options = [*harness.app.small, "--max-steps=7"]
    if not horizon:
        options.append("--epochs=1")
    again = harness.train(2, *options)
    last = 7
    if not horizon:
        last = min(7, Shape.of(again).epoch)
    assert (again["steps"], again["resumed_from_step"]) == (last, 3)
    outcome = harness.run(2, *harness.app.small, "--checkpoint-every=3", "--keep-checkpoints=1", "--timeout=60")
    check_same_end(harness, outcome, 2, undisturbed(2))


@pytest.mark.soak  # the quick tests refuse such a run dir (tests/launch)
def test_another_apps_run_dir_is_refused(harness: Harness) -> None:
    run_dir = harness.folder / "run"
    checkpoint.save(run_dir, "another_app", 3, {"model": {"w": np.ones(3)}}, {}, {}, 3)
    checkpoint.finish()
    outcome = harness.run(1, *harness.app.small)
    assert outcome.code == 2
    assert "another_app" in outcome.errors[0]


@pytest.mark.soak  # the quick tests set a run aside (tests/launch)
def test_no_resume_starts_anew_and_keeps_the_old_run(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    reference = undisturbed(2)
    run_dir = harness.folder / "run"
    shutil.copytree(reference["run_dir"], run_dir)
    # The newest checkpoint belongs to a run that these options cannot resume.
    checkpoint.save(run_dir, harness.app.name, reference["steps"] + 1, {"model": {}}, {}, {"seed": 3}, keep=4)
    checkpoint.finish()
    kept = snapshot(run_dir)
    result = check_same_end(harness, harness.run(2, *harness.app.small, "--no-resume"), 2, reference)
    assert result["resumed_from_step"] is None
    (aside,) = run_dir.glob("earlier-*")
    assert snapshot(aside) == kept


# --- damage --------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one bit flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
}


@pytest.mark.soak  # the quick tests damage one file (test_one_run_survives_every_fault), and in each way in tests/core
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, damage: str, table: list[str]
) -> None:
    template = Path(undisturbed(2)["run_dir"])
    _, before, newest = sorted(path.name for path in (template / "checkpoints").iterdir())
    files = sorted(path.name for path in (template / "checkpoints" / newest).iterdir())
    assert "manifest.json" in files
    if not soak:  # --every-case damages one file in each way, and --soak damages all files
        files = [files[list(DAMAGES).index(damage) % len(files)]]
    for name in files:
        run_dir = harness.folder / name
        shutil.copytree(template, run_dir)
        DAMAGES[damage](run_dir / "checkpoints" / newest / name)
        outcome = harness.run(2, *harness.app.small, run_dir=run_dir)
        result = check_same_end(harness, outcome, 2, undisturbed(2))
        assert result["resumed_from_step"] == int(before.removeprefix("step-"))
        assert newest in outcome.stderr
        assert "skipped" in outcome.stderr
        assert (run_dir / "checkpoints" / f"damaged-{newest}").is_dir()
    table.append(f"| {harness.app.name} | 2 | newest checkpoint {damage} | {len(files)} | {len(files)} |")


@pytest.mark.soak  # the quick tests check that nothing is written (tests/core)
def test_when_no_checkpoint_is_good_nothing_is_overwritten(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    run_dir = harness.folder / "run"
    shutil.copytree(undisturbed(2)["run_dir"], run_dir)
    folders = list((run_dir / "checkpoints").iterdir())
    for folder in folders:
        flip(sorted(folder.glob("model*.safetensors"))[0])
    kept = snapshot(run_dir)
    outcome = harness.run(2, *harness.app.small)
    assert outcome.code == 1, outcome
    assert len(outcome.errors) == 1
    assert all(folder.name in outcome.errors[0] for folder in folders)
    assert snapshot(run_dir) == kept


@pytest.mark.soak  # the quick tests refuse such weights in --init-from
def test_a_checkpoint_made_by_hand_must_fit_the_model(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool
) -> None:
    run_dir = harness.folder / "run"
    shutil.copytree(undisturbed(2)["run_dir"], run_dir)
    good = checkpoint.newest(run_dir, print)
    assert good
    groups = {group: arrays(good, group) for group in good.pieces or good.contents}
    model = groups["model"]
    name = sorted(model)[0]
    other_shape = model[name][:1]
    other_type = model[name].astype(np.float16)
    for wrong in amount(soak, few=[other_shape], many=[other_shape, other_type]):
        save(good, {**groups, "model": {**model, name: wrong}})
        kept = snapshot(run_dir)
        outcome = harness.run(1, *harness.app.small)
        assert outcome.code == 1, outcome
        assert name in outcome.errors[0]
        assert "starting it again" not in outcome.stderr
        assert snapshot(run_dir) == kept


def arrays(good: checkpoint.Checkpoint, group: str) -> dict[str, NDArray[Any]]:
    """Return all arrays of a checkpoint's group by name, assembled from pieces if the checkpoint is sharded."""
    if not good.pieces:
        return good.arrays(group)
    return {name: stored.read() for name, stored in storage.stored_groups(good)[group].items()}


def save(good: checkpoint.Checkpoint, groups: Mapping[str, dict[str, NDArray[Any]]]) -> None:
    """Save ``groups`` in place of the arrays of ``good``. In a sharded checkpoint, each array becomes one piece."""
    run_dir = good.folder.parents[1]
    if good.pieces:
        pieces = {
            group: {name: TensorShard(array, (0,) * array.ndim, array.shape) for name, array in by_name.items()}
            for group, by_name in groups.items()
        }
        body = {"app": good.app, "step": good.step, "state": good.state, "arithmetic": good.resume_invariants}
        storage.save(OneRank(), 0, good.folder, pieces, body, 3)
    else:
        checkpoint.save(run_dir, good.app, good.step, groups, good.state, good.resume_invariants, 3)
    checkpoint.finish()


class OneRank:
    """The collectives of a job of one rank, with the interface of `samestep.run.Ranks`."""

    def broadcast(self, content: bytes) -> bytes:
        return content

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        return row[None]


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Return the contents of all files of a run dir by path, except logs and the lock."""
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name != ".lock" and path.relative_to(run_dir).parts[0] != "log"
    }


# --- a full disk ---------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.soak  # the quick tests make a write fail (tests/core)
def test_a_full_disk_is_reported_and_nothing_is_lost(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """This test must run as root, because it mounts a tmpfs."""
    reference = undisturbed(2)
    one = sum(path.stat().st_size for path in max(Path(reference["run_dir"]).glob("checkpoints/step-*")).iterdir())
    with small_disk(harness.folder / "disk", str(int(2.6 * one) + 100_000)) as disk:
        outcome = harness.run(2, *harness.app.small, run_dir=disk / "run")
        assert outcome.code == 1, outcome
        assert "no space left" in outcome.errors[0].lower()
        assert "starting it again" not in outcome.stderr
        assert checkpoint.newest(disk / "run", pytest.fail)
        subprocess.run(["mount", "-o", f"remount,size={10 * one + 2**26}", str(disk)], check=True)
        result = check_same_end(harness, harness.run(2, *harness.app.small, run_dir=disk / "run"), 2, reference)
        assert result["resumed_from_step"] > 0
