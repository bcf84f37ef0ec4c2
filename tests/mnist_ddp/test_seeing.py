"""Run `samestep_observe.watch` and `samestep_observe.report` on a real run, while it trains and after a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from harness import ROOT, Harness
from processes import listening
from samestep_observe import run_reader
from samestep_observe.run_reader import world_size_of


def output_of(harness: Harness, *arguments: str | Path) -> str:
    """Run ``python -m`` with arguments, and return its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env=harness.environ(PYTHONPATH=str(ROOT / "core")),
        cwd=harness.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_run_is_seen_while_it_trains_and_after_a_kill(harness: Harness) -> None:
    job = harness.start(2, *harness.app.small, "--epochs=6")
    job.wait_for_step(6)
    live = output_of(harness, "samestep_observe.watch", job.run_dir, "--once")
    assert live.splitlines()[:2] == ["running", f"mnist_ddp  {job.run_dir}"]
    assert re.search(r"^step \d+ of 96  [█░]+ \d+%$", live, re.MULTILINE)
    assert re.search(r"samples/s  .* steps/s  .* left$", live, re.MULTILINE)
    assert re.search(r"^ranks +2 of 2 have heartbeats here$", live, re.MULTILINE)
    for rank in (0, 1):
        assert re.search(rf"^ +{rank}  {re.escape(os.uname().nodename)} +step \d+  ", live, re.MULTILINE)
    assert listening(harness.left_running()) == {"0100007F"}  # on one machine, the store also listens on loopback only
    os.kill(job.ranks()[1], signal.SIGKILL)
    result = harness.checked(job.finish(), 2)
    after = output_of(harness, "samestep_observe.watch", job.run_dir)
    assert "finished at step 96" in after
    assert f"started 2 times; resumed at step {result['resumed_from_step']}" in after
    output_of(harness, "samestep_observe.report", job.run_dir, "-o", "report.html")
    data = run_reader.read(job.run_dir)
    assert (data.problems, data.log.last_step, world_size_of(data.metrics.header, {})) == ([], 96, 2)
    assert [event.step for event in data.events if event.kind == "restart"] == [result["resumed_from_step"]]
    assert len(data.log.launches) == 2
    assert len(data.metrics.curves["loss"].steps) == 96
    assert [each.step for each in data.checkpoints if not each.problem][-1] == 96
    text = (harness.folder / "report.html").read_text()
    assert f"resumed at step {result['resumed_from_step']}, 2 ranks" in text
    assert result["weights_sha256"][:12] in text
