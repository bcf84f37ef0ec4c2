"""Test that a process without the job's key cannot join or receive the model, and that a lost run dir ends the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, bare
from processes import listening_ports
from test_mnist_elastic import SHORT, check_same, heartbeats, members, waits_for  # type: ignore[import-not-found,unused-ignore]

STRANGER, PROOFS, FLOOD = (str(Path(__file__).parent / name) for name in ("stranger.py", "proofs.py", "flood.py"))
FEW_BYTES = 1000  # more than a challenge or an error of HTTP; the model has 87,000 bytes


def test_a_stranger_with_a_higher_progress_changes_no_bit_and_receives_no_model(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The stranger also uses the names of members, before and after the group changes."""
    reference = undisturbed(1, *SHORT)
    job = harness.start(2, *SHORT, run_dir=harness.folder / "run", **waits_for(harness, 2))
    job.wait_for_step(5)
    pids = [job.alive(0)["pid"], *(beat["pid"] for beat in heartbeats(job).values())]
    command = [sys.executable, STRANGER, *map(str, listening_ports(pids))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=harness.environ(), **pipes) as stranger:  # type: ignore[call-overload]
        try:
            assert stranger.stdout.readline()
            for rank in (1, 2):
                count = len(members(job))
                os.kill(heartbeats(job)[rank]["pid"], signal.SIGKILL)
                job.wait_for(lambda: len(members(job)) > count and rank in members(job)[-1])  # noqa: B023
            output, _ = stranger.communicate("", timeout=60)
        finally:
            stranger.kill()
    seen = json.loads(output.splitlines()[-1])
    assert any("stranger" in group and len(group) > 1 for group in seen["groups"]), seen  # proposed by the lighthouse
    assert seen["accepted"] == 0
    assert seen["most_bytes"] < FEW_BYTES
    outcome = job.finish()
    result = harness.checked(outcome, 2)
    check_same(result, reference)
    assert all({*ranks} <= {1, 2} for ranks in members(job))
    assert outcome.stderr.count("a process that is not part of this job asks the lighthouse for a group") == 1


def test_a_member_accepts_only_proofs_made_for_it_and_its_group(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, PROOFS])
    refused = "the process connected as member 1 does not know this job's key"
    cases = ["key accepted", *(f"{kind} {refused}" for kind in ("other-key", "other-group", "returned"))]
    assert outcome.stdout.splitlines() == cases, outcome


def test_a_launcher_answers_during_and_after_a_flood_of_connections(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, FLOOD])
    answers = ["during", "after"]
    assert outcome.code == 0, outcome
    assert json.loads(outcome.stdout) == {"deadline": answers, "limit": answers, "displaced": "second"}


@pytest.mark.parametrize("kind", ["removed", "replaced", "emptied"])
def test_a_run_dir_that_is_removed_or_replaced_ends_the_job(harness: Harness, kind: str) -> None:
    """``rm -r`` may leave the run dir itself, because ranks write into it meanwhile."""
    run_dir = harness.folder / "run"
    job = harness.start(2, *SHORT, run_dir=run_dir, **waits_for(harness, 3))
    job.wait_for_step(3)
    name = "metrics.jsonl" if kind == "emptied" else ""
    os.rename(run_dir / name, harness.folder / "moved")
    if kind == "replaced":
        shutil.copytree(harness.folder / "moved", run_dir)
    outcome = job.finish()
    assert outcome.code == 1
    assert f"{run_dir / name} was removed or replaced: leave the run dir in place" in outcome.errors[0]
    assert "starting it again" not in outcome.stderr
    assert run_dir.exists() == (kind != "removed")  # no process creates it again
