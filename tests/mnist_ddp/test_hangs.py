"""Test that the console names rank and line of a hang in a collective. test_hang_diagnosis.py has other hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from harness import FAULTS, ROOT, Harness, Outcome, python_path
from samestep import untrusted

APP = ROOT / "apps" / "mnist_ddp"
WHO = rf"\({re.escape(os.uname().nodename)}, pid \d+\)"
GRADIENTS = r"\[21840\] float"


def place(file: str, code: str, nth: int = 0) -> str:
    """Return a pattern of the file and line number of the ``nth`` line (from 0) in ``file`` that contains ``code``."""
    found = [i for i, line in enumerate((APP / file).read_text().splitlines(), 1) if code in line]
    return rf"{re.escape(file)}:{found[nth]} in "


def hung(harness: Harness, kind: str, rank: int, timeout: int) -> Outcome:
    """Run a job without restarts in which a rank hangs, at step 6 if the kind has a step. Return its outcome."""
    path = os.pathsep.join([python_path(ROOT / "tests" / "mnist_ddp" / "hangs"), str(FAULTS)])
    what = {"kind": kind, "rank": rank, "step": 6}
    options = [*harness.app.small, f"--timeout={timeout}", "--max-restarts=0"]
    outcome = harness.run(2, *options, SAMESTEP_HANG=json.dumps(what), PYTHONPATH=path)
    assert outcome.code == 1, outcome
    logs = harness.folder / "run" / "log"
    stalled = untrusted.read_object(logs / "stalled")
    if stalled:
        waited = untrusted.read_object(logs / f"hang-{stalled['rank']}.json")["waited"]
        over = waited - timeout  # seconds from the timeout to the report
        print(f"{kind}: told {over:.2f} s over --timeout: {outcome.errors[0]}")  # pytest -rP shows this line
    return outcome


@pytest.mark.parametrize(
    ("kind", "collective"),
    ids=["skip", "order"],
    argvalues=[
        ("skip", rf"gather (?P<number>\d+) {GRADIENTS} at {place('train.py', '.backward()')}train_step "),
        pytest.param(
            "order",
            rf"broadcast (?P<number>\d+) \[11\] double at {place('train.py', 'run.sync()')}train ",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_ranks_in_different_collectives_are_both_named(harness: Harness, kind: str, collective: str) -> None:
    """With two ranks, the report cannot name the faulty rank, which skipped a collective or changed the order."""
    line = hung(harness, kind, 1, 25).errors[0]  # 25 s also suffice to create the first optimizer
    others = {
        "skip": rf"all_gather (\d+) \[16\] long at {place('train.py', 'run.save(')}train ",
        "order": rf"all_gather (\d+) \[11\] double at {place('train.py', 'run.sync()')}train ",
    }
    steps = r"last alive at step \d+ waits in "
    found = re.fullmatch(
        rf"error: no progress for 25 s: rank 0 {WHO} {steps}{others[kind]}.*; rank 1 {WHO} {steps}{collective}.*; "
        r"these do not match; samestep hang \S+ shows all stacks",
        line,
    )
    assert found, line
    assert found[1] == found["number"]
    command = [sys.executable, "-m", "samestep", "hang", str(harness.folder / "run")]
    environ = {**harness.environ(), "PYTHONPATH": str(ROOT / "core")}
    output = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    assert line.partition("s: ")[2].rpartition("; python")[0] in output
    # This matches the line of rank 1, which may be failing because rank 0 has ended.
    assert re.search(r"rank 1  .*\n(.*\n)+?  mnist_ddp/train\.py:\d+ \S+\n      \w+", output), output


def test_a_rank_that_never_comes_is_named_and_the_others_wait_at_the_rendezvous(harness: Harness) -> None:
    line = hung(harness, "never", 1, 5).errors[0]
    code = "distributed.rendezvous("
    assert re.fullmatch(
        rf"error: no progress for 5 s: 1 of 2 ranks never seen from here: 1 \(rank 1 is pid \d+, .*\); "
        rf"rank 0 {WHO} waits at {place('train.py', code)}main .*",
        line,
    ), line


@pytest.mark.soak
def test_a_rank_that_is_stopped_while_it_writes_a_checkpoint_is_named_with_the_file(harness: Harness) -> None:
    line = hung(harness, "write", 0, 15).errors[0]
    found = re.match(
        rf"error: no progress for 15 s: rank 0 {WHO} last alive at step \d+, silent for \d+ s, stopped by a signal "
        r"\(kill -CONT \d+ continues it\) while it has \.step-00000005\.tmp/model\.safetensors open, last seen at "
        rf"(\w+\.py:\d+ in \w+) .*; rank 1 {WHO} waits in gather \d+ {GRADIENTS} at ",
        line,
    )
    assert found, line
    file, number, function = untrusted.read_object(harness.folder / "run" / "log" / "alive-0")["at"]
    assert found[1] == f"{os.path.basename(file)}:{number} in {function}"


@pytest.mark.soak
def test_ranks_whose_shapes_differ_name_the_line_of_the_one_that_died(harness: Harness) -> None:
    """Gloo does not hang. A rank that receives too much aborts in C++, and the other rank aborts or disconnects."""
    outcome = hung(harness, "shapes", 1, 15)
    where = place("train.py", "run.sync()")
    assert re.search(
        rf"error: the job ended with code \d+.*; rank 0 {WHO} died \(Aborted\) at {where}train "
        r"\(actions = run\.sync\(\)\).*: see ",
        outcome.stderr,
    ), outcome.stderr
