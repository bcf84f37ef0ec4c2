"""Test that one process that has imported train.py forks the ranks, also after a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Harness
from processes import environments, parent
from samestep.job_info import JobInfo
from test_mnist_elastic import SHORT, check_same, heartbeats, waits_for  # type: ignore[import-not-found,unused-ignore]


def test_a_killed_rank_is_forked_again_from_the_process_that_has_imported_train(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The forked rank has its own title, log and environment, and no module of the launcher."""
    reference = undisturbed(1, *SHORT)
    job = harness.start(2, *SHORT, run_dir=harness.folder / "run", **waits_for(harness, 2))
    job.wait_for_step(5)
    first = heartbeats(job)[1]["pid"]
    forker = parent(job.alive(0)["pid"])
    assert {parent(beat["pid"]) for beat in heartbeats(job).values()} == {forker}
    os.kill(first, signal.SIGKILL)
    second = job.wait_for(lambda: (pid := heartbeats(job).get(1, {}).get("pid")) != first and pid)
    assert parent(second) == forker
    assert Path(f"/proc/{second}/cmdline").read_bytes().rstrip(b"\0") == b"rank 1: mnist_elastic train.py"
    mine = JobInfo.from_environ(environments()[second])
    assert (mine.rank, mine.name, mine.forker) == (1, "000002", None)
    assert mine.job == JobInfo.from_environ(environments()[forker]).job
    outcome = job.finish()
    check_same(harness.checked(outcome, 2), reference)
    assert "rank 1 has ended with SIGKILL at step" in outcome.stderr
    assert (job.run_dir / "log" / "rank-1.log").read_text().count(", pid ") == 2
    loaded = json.loads((Path(reference["run_dir"]).parent / "modules-1").read_text())
    assert "samestep.run" in loaded
    assert not [name for name in loaded if name.startswith("samestep_")]


def test_a_forked_launcher_that_is_killed_ends_with_its_ranks_and_starts_again(harness: Harness) -> None:
    """test_mnist_elastic.py kills a launcher that does not fork."""
    job = harness.start(2, *SHORT, "--max-steps=20", run_dir=harness.folder / "run", **waits_for(harness, 3))
    job.wait_for_step(5)
    first = [beat["pid"] for beat in heartbeats(job).values()]
    os.kill(job.alive(0)["pid"], signal.SIGKILL)
    outcome = job.finish()
    assert harness.checked(outcome, 2)["restarts"] == 1
    assert f"the job ended with code {-signal.SIGKILL}" in outcome.stderr
    assert not {*first} & environments().keys()
