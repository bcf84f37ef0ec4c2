"""Test that lost, stopped, added and removed ranks leave the weights with the bits of one undisturbed rank."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, Job, bare, last_step, losses, recorded
from processes import environments, listening
from samestep import checkpoint, step_losses

FAULTS = Path(__file__).parent / "faults"
RUN = ("--dataset=mnist-5k", "--global-batch-size=100", "--checkpoint-every=50", "--log-every=1", "--virtual-ranks=4")
SHORT = (*RUN, "--epochs=20", "--max-steps=240")  # options of most tests, which share the undisturbed run


def heartbeats(job: Job) -> dict[int, dict[str, Any]]:
    """Return the heartbeats of the live ranks, by rank from 1. The file alive-0 is the launcher's."""
    found = {int(path.name[6:]): job.alive(int(path.name[6:])) for path in (job.run_dir / "log").glob("alive-[0-9]*")}
    return {rank: beat for rank, beat in sorted(found.items()) if rank and beat.get("pid") in environments()}


def waits_for(harness: Harness, members: int) -> dict[str, str]:
    """Return variables that slow down groups of fewer than ``members`` ranks, so that lost ranks rejoin in time."""
    path = os.pathsep.join([str(FAULTS), harness.environ()["PYTHONPATH"]])
    return {"PYTHONPATH": path, "SAMESTEP_COMPLETE": str(members)}


def kill(job: Job, chance: random.Random, updates: int = 5) -> str:
    """Wait for a rank that has done at least ``updates`` updates, kill it, and return its rank, step and function.

    The launcher ends the job if a rank ends four times in a row without an update.
    """

    def candidates() -> list[tuple[int, dict[str, Any]]]:
        return [(rank, beat) for rank, beat in heartbeats(job).items() if beat["updates"] >= updates]

    rank, beat = chance.choice(job.wait_for(candidates))
    os.kill(beat["pid"], signal.SIGKILL)
    return f"rank {rank} at step {beat['step']} in {beat['at'][2]}"


def check_same(result: dict[str, Any], reference: dict[str, Any]) -> None:
    """Check that the run has the weights and logged numbers of ``reference``, and each step once."""
    assert result["weights_sha256"] == reference["weights_sha256"]
    logged = losses(Path(result["run_dir"]))  # fails unless each step occurs once
    assert step_losses.read(Path(result["run_dir"])).tolist() == [*enumerate(logged, 1)]
    assert recorded(Path(result["run_dir"])) == recorded(Path(reference["run_dir"]))


def test_four_ranks_of_which_some_are_killed_end_with_the_bits_of_one(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, table: list[str]
) -> None:
    kills, options, runs = (20, (*RUN, "--epochs=200"), 5) if soak else (4, SHORT, 1)
    reference = undisturbed(1, *options)
    for number in range(runs):
        chance = random.Random(number)
        where = []
        environ = {} if soak else waits_for(harness, 4)
        job = harness.start(4, *options, run_dir=harness.folder / str(number), **environ)
        job.wait_for_step(10)
        first = {rank: beat["pid"] for rank, beat in heartbeats(job).items()}
        assert len(first) == 4
        for _ in range(kills // 4):
            # Kill one rank, then two ranks at once, then a rank that may not yet have rejoined.
            where += [kill(job, chance)]
            time.sleep(chance.uniform(0, 2))
            where += [kill(job, chance), kill(job, chance)]
            job.wait_for_step(last_step(job.run_dir) + chance.randrange(20))
            where += [kill(job, chance, updates=0)]
            time.sleep(chance.uniform(0, 3) if soak else 0)
        outcome = job.finish(limit=1200 if soak else 200)
        result = harness.checked(outcome, 4)
        check_same(result, reference)
        assert result["rejoins"] >= len(set(where)) - 1, where
        assert result["restarts"] == 0
        pauses = sorted(result["pauses"])
        table.append(
            f"| mnist_elastic | 4 | {kills} SIGKILLs at random moments, some at once; {result['rejoins']} "
            f"rejoins; {result['steps_repeated']} steps repeated; pauses of {pauses[len(pauses) // 2]:.2f} s in "
            f"the median, {pauses[-1]:.2f} s at most | 1 | 1 |"
        )


def test_ranks_are_added_taken_out_stopped_and_all_killed_and_the_job_too(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """One job gets all events, because a start is slow: ranks join, leave and hang, and all processes are killed."""
    reference = undisturbed(1, *SHORT)
    run_dir = harness.folder / "run"
    job = harness.start(1, *SHORT, "--timeout=16", run_dir=run_dir, **waits_for(harness, 5))
    job.wait_for_step(5)
    join = [sys.executable, "-I", str(ROOT / "apps/mnist_elastic/join.py"), str(job.run_dir)]
    done = bare(harness, [*join, "3"])
    assert (done.code, done.stdout) == (0, "rank 2 starts\nrank 3 starts\nrank 4 starts\n")
    job.wait_for(lambda: members(job)[-1] == [1, 2, 3, 4])
    done = bare(harness, join)
    assert (done.code, done.errors) == (2, ["error: 4 ranks train with --virtual-ranks 4: no more can join"])
    pids = [job.alive(0)["pid"], *(beat["pid"] for beat in heartbeats(job).values())]
    assert listening(pids) == {"0100007F"}  # 127.0.0.1

    for rank in (1, 3):
        os.kill(heartbeats(job)[rank]["pid"], signal.SIGTERM)
    job.wait_for(lambda: members(job)[-1] == [2, 4])

    stopped = heartbeats(job)[2]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for_step(last_step(job.run_dir) + 20)  # the other ranks continue without the stopped rank
    job.wait_for(lambda: heartbeats(job).get(2, {}).get("pid", stopped) != stopped)

    for beat in heartbeats(job).values():
        os.kill(beat["pid"], signal.SIGKILL)
    job.wait_for_step(last_step(job.run_dir) + 5)

    job.process.terminate()
    outcome = job.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert "rank 2 has taken no part for 16 s: it is killed" in outcome.stderr
    assert int(checkpoint.folders(job.run_dir)[0].name[5:]) == last_step(job.run_dir)

    late = faults_at(harness, reference["steps"] - 2, [("updated", 2, KILLED)])
    environ = {**waits_for(harness, 0), "SAMESTEP_FAULTS": json.dumps(late)}
    job = harness.start(2, *SHORT, "--start-method=exec", run_dir=run_dir, **environ)
    job.wait_for_step(last_step(job.run_dir) + 10)
    os.kill(job.alive(0)["pid"], signal.SIGKILL)
    result = harness.checked(job.finish(), 2)
    assert (result["restarts"], result["rejoins"]) == (1, 1)
    assert result["members"][-1]["ranks"] == [1]  # the job does not wait for a late rank
    check_same(result, reference)


@pytest.mark.soak  # the quick tests stop a job once (the test above)
def test_ten_stops_of_the_job_in_a_row_cost_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], table: list[str]
) -> None:
    reference = undisturbed(1, *SHORT)
    chance = random.Random(0)
    saved = 0
    for _ in range(10):
        job = harness.start(3, *SHORT, run_dir=None, **waits_for(harness, 3))
        job.wait_for_step(saved + chance.randrange(1, 12))
        job.process.terminate()
        outcome = job.finish()
        assert outcome.code == 128 + signal.SIGTERM, outcome
        saved = last_step(job.run_dir)
        assert checkpoint.folders(job.run_dir)[0].name == f"step-{saved:08d}"
    result = harness.checked(harness.run(3, *SHORT), 3)
    assert result["resumed_from_step"] == saved
    check_same(result, reference)
    table.append("| mnist_elastic | 3 | SIGTERM to the script soon after a resume | 10 | 10 |")


def members(job: Job) -> list[list[int]]:
    """Return the ranks of each group of the job, in the order of the events."""
    events = (job.run_dir / "log" / "events.jsonl").read_text().splitlines()
    return [sorted(json.loads(line)["ranks"]) for line in events if '"members"' in line]


KILLED = signal.SIGKILL
REDUCED = ("reduced", 1, 0)
FLIPPED = ("differs", 2, 0)
# For each case: faults (moment, rank or None, signal), and the expected number of restarts of the job.
MOMENTS: dict[str, tuple[list[tuple[str, int | None, int]], int]] = {
    "a reduction fails on one rank, the others have updated": ([REDUCED], 0),
    "those who have updated are killed": ([REDUCED, ("updated", 2, KILLED), ("updated", 3, KILLED)], 0),
    "one who has updated is stopped and comes back": ([REDUCED, ("updated", 2, signal.SIGSTOP)], 0),
    "a rank is killed while it sends its state": ([("updated", 1, KILLED), ("copying", None, KILLED)], 0),
    "a stranger has the place of a rank that comes back": ([("updated", 2, KILLED), ("stranger", 2, 0)], 0),
    "a flipped bit is found by the next checkpoint": ([FLIPPED], 1),
}


def faults_at(harness: Harness, step: int, faults: list[tuple[str, int | None, int]]) -> list[dict[str, Any]]:
    """Return the faults, due from ``step`` on, in the format of faults/sitecustomize.py."""
    return [
        {"at": at, "step": step, "signal": sent, "done": str(harness.folder / f"{at}-{rank}-{step}")}
        | ({"rank": rank} if rank else {})
        for at, rank, sent in faults
    ]


def test_faults_at_exact_moments_cost_no_bit(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """One run gets four faults, because a start is slow: a changed weight, two kinds of kills, and a stranger."""
    reference = undisturbed(1, *SHORT)
    names = ["a flipped bit is found by the next checkpoint", "those who have updated are killed"]
    names += ["a rank is killed while it sends its state", "a stranger has the place of a rank that comes back"]
    values = [fault for i, name in enumerate(names) for fault in faults_at(harness, 20 + 40 * i, MOMENTS[name][0])]
    environ = {"SAMESTEP_FAULTS": json.dumps(values), **waits_for(harness, 3)}
    outcome = harness.run(3, *SHORT, run_dir=harness.folder / "run", **environ)
    result = harness.checked(outcome, 3)
    assert all(Path(each["done"]).exists() for each in values)
    check_same(result, reference)
    assert not [*harness.folder.glob("stranger-*-state")]  # the stranger received no model
    assert (result["restarts"], result["rejoins"]) == (1, 5), outcome.stderr


@pytest.mark.soak  # the quick tests inject four of these in one run (the test above)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_fault_at_an_exact_moment_costs_no_bit(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], moment: str
) -> None:
    reference, (faults, restarts) = undisturbed(1, *SHORT), MOMENTS[moment]
    values = faults_at(harness, 20, faults)
    environ = {"SAMESTEP_FAULTS": json.dumps(values), **waits_for(harness, 3)}
    job = harness.start(3, *SHORT, run_dir=harness.folder / "run", **environ)
    if signal.SIGSTOP in (sent for _, _, sent in faults):
        job.wait_for(lambda: Path(values[-1]["done"]).exists())
        stopped = job.alive(2)["pid"]
        job.wait_for_step(40)  # the other ranks continue without the stopped rank
        os.kill(stopped, signal.SIGCONT)
        job.wait_for(lambda: members(job)[-1] == [1, 2, 3])
        assert heartbeats(job)[2]["pid"] == stopped
    outcome = job.finish()
    result = harness.checked(outcome, 3)
    assert all(Path(each["done"]).exists() for each in values)
    assert not [*harness.folder.glob("stranger-*-state")]  # the stranger received no model
    check_same(result, reference)
    assert result["restarts"] == restarts
    kills = sum(sent == signal.SIGKILL for _, _, sent in faults)
    assert restarts or result["rejoins"] == kills, outcome.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["2", "--min-ranks=3"], "--min-ranks 3 is above 2 ranks: start more"),
        (["9"], "--virtual-ranks 8 is below 9 ranks: start fewer"),
        (["2", "--virtual-ranks=0"], "--virtual-ranks 0: this app sums in a fixed tree"),
    ],
)
def test_a_mistake_of_its_own_options_is_one_line(harness: Harness, options: list[str], words: str) -> None:
    outcome = harness.run(*options)
    assert (outcome.code, len(outcome.errors)) == (2, 1)
    assert words in outcome.errors[0]


def test_nothing_can_join_where_no_job_runs(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, str(ROOT / "apps/mnist_elastic/join.py"), str(harness.folder)])
    assert (outcome.code, len(outcome.errors)) == (2, 1)
    assert "no job runs in" in outcome.errors[0]
