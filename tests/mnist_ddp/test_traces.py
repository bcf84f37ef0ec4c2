"""Run ``samestep diff`` on real runs with ``--trace-every`` that diverge by a changed weight or exchanged samples."""

from __future__ import annotations

import gzip
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import Harness, faulty, write_fashion, write_idx
from samestep import trace
from samestep.sharding import GlobalBatches

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
    """One weight in the memory of run B changes after step 6. A replay of run A equals run A."""
    for name, rank in (("a", 1), ("b", 0)):  # run A has no rank 1, so its weights stay unchanged
        fault = {"rank": rank, "differ": 6}
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


def test_diff_names_the_step_of_two_exchanged_samples(harness: Harness) -> None:
    """Both samples are in the batch of step 3. The traces name the gradients, and the replays name the samples."""
    folder = harness.folder / "data" / "fashion-mnist"
    write_fashion(folder)
    changed = Path(shutil.copytree(harness.folder / "data", harness.folder / "changed")) / "fashion-mnist"
    chosen = sorted(GlobalBatches(60_000, BATCH, 1).indices(2)[:2].tolist())
    for name, header in (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8)):
        values = np.frombuffer(gzip.decompress((folder / name).read_bytes())[header:], np.uint8).copy()
        values = values.reshape(60_000, 28, 28) if "images" in name else values
        values[chosen] = values[chosen[::-1]]
        write_idx(changed / name, values)
    traced = [*OPTIONS, "--dataset=fashion-mnist", "--trace-every=1"]
    for name, data in (("a", folder.parent), ("b", changed.parent)):
        outcome = harness.run(2, *traced, f"--data-dir={data}", run_dir=harness.folder / name)
        assert outcome.code == 0, outcome
    done = command(harness, "diff", "a", "b")
    assert done.returncode == 1, done
    assert "trace: step 3, tensor conv1.weight and 7 more: other gradients from equal weights" in done.stdout
    assert f"the values of sample {chosen[0]}, {chosen[1]} differ, first used in step 3" in done.stdout


def test_trace_of_a_killed_run_is_that_of_one_process_and_costs_no_bit(harness: Harness) -> None:
    """Train with virtual ranks. The resumed run has each step once, and the weights of a run without a trace."""
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
