"""``--trace-every`` and ``samestep diff`` on real runs, which part by a changed weight."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from harness import Harness, faulty
from samestep import trace

LIMIT = 120  # seconds
STEPS = 10
BATCH = 128
OPTIONS = (f"--max-steps={STEPS}", f"--global-batch-size={BATCH}", "--checkpoint-every=5", "--log-every=5")
TRACED = (*OPTIONS, "--dataset=mnist-5k", "--trace-every=1")


def command(harness: Harness, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``samestep WORDS``."""
    return subprocess.run(
        [sys.executable, "-m", "samestep", *words],
        env=harness.environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=harness.folder,
    )


def test_diff_names_the_step_and_the_tensor_of_a_changed_weight(harness: Harness) -> None:
    """One weight in the memory of run B changes after step 6. A replay of A, with its trace, is equal."""
    for name, fault in (("a", {}), ("b", {"rank": 0, "differ": 6})):
        outcome = harness.run(1, *TRACED, run_dir=harness.folder / name, **faulty(fault))
        assert outcome.code == 0, outcome
    done = command(harness, "diff", "a", "b", "--html=page.html")
    assert done.returncode == 1, done
    place = "step 7, tensor conv1.weight: other weights at its start, after equal weights and gradients of step 6"
    assert f"trace: {place}" in done.stdout.splitlines()
    assert "A run again has its own losses up to step " in done.stdout
    assert "B departs from its own replay, A does not: an event in B's process" in done.stdout
    page = (harness.folder / "page.html").read_text()
    assert "part at step 7</text>" in page
    assert place in page


def test_trace_of_a_killed_run_is_that_of_one_process_and_costs_no_bit(harness: Harness) -> None:
    """With virtual ranks. The resumed run has each step once, and the weights of a run without a trace."""
    tree = "--virtual-ranks=4"
    plain = harness.train(1, *OPTIONS, "--dataset=mnist-5k", tree, run_dir=harness.folder / "plain")
    job = harness.start(3, *TRACED, tree, **faulty({"rank": 1, "signal": signal.SIGKILL, "step": 8}))
    result = harness.checked(job.finish(), 3)
    assert result["restarts"] == 1
    assert result["weights_sha256"] == plain["weights_sha256"]
    one = harness.train(1, *TRACED, tree, "--trace-every=2", run_dir=harness.folder / "one")
    found = trace.read(job.run_dir)
    assert [*found] == [*range(1, STEPS + 1)]
    assert trace.read(Path(one["run_dir"])) == {step: found[step] for step in range(2, STEPS + 1, 2)}
