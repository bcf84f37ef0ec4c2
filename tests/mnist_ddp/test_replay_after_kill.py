"""Run ``samestep replay`` and ``samestep verify`` on real runs in which a rank was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Harness
from repository import REPOSITORY as ROOT
from samestep import step_losses
from samestep_check.records import Records
from samestep_observe.recorded import RecordedRun

LIMIT = 120  # seconds
STEPS = 40
OPTIONS = (
    "--dataset=mnist-5k",
    f"--max-steps={STEPS}",
    "--checkpoint-every=15",
    "--log-every=20",
    "--keep-checkpoints=9",
)


def command(harness: Harness, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``samestep WORDS``."""
    return subprocess.run(
        [sys.executable, "-m", "samestep", *words],
        env=harness.environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=cwd or harness.folder,
    )


def killed_run(harness: Harness, *options: str) -> Path:
    """Train on 3 ranks, kill one rank after the first checkpoint, and return the run dir."""
    job = harness.start(3, *OPTIONS, *options)
    job.wait_for(lambda: (job.run_dir / "checkpoints" / "step-00000015").is_dir())
    os.kill(job.ranks()[1], signal.SIGKILL)
    result = harness.checked(job.finish(), 3)
    assert result["restarts"] == 1
    return job.run_dir


@pytest.mark.parametrize("virtual_ranks", [True, False])
def test_replayed_steps_of_a_killed_run_have_the_recorded_bits(harness: Harness, virtual_ranks: bool) -> None:
    """With virtual ranks, the replay runs on one rank, otherwise on three. It does not change the run dir."""
    run_dir = killed_run(harness, *(["--virtual-ranks=4"] if virtual_ranks else []))
    assert step_losses.read(run_dir)["step"].tolist() == [*range(1, STEPS + 1)]
    before = sorted(path.stat().st_mtime_ns for path in run_dir.rglob("*"))
    done = command(harness, "replay", str(run_dir), "--step=17", "--to=22", f"--export={harness.folder / 'export'}")
    assert done.returncode == 0, done
    ranks = "1 rank" if virtual_ranks else "3 ranks"
    assert done.stderr == f"replaying 7 steps of {run_dir} at {ranks}, from checkpoint step 15\n"
    assert "equal: 7 of 7 losses of steps 16 to 22 have the recorded bits" in done.stdout
    assert f"rank 2: {32 if virtual_ranks else 42} samples" in done.stdout
    assert "not seen" not in done.stdout
    for text in ("learning rate 0.03", "conv1.weight", "largest activations: "):
        assert text in done.stdout
    samples = json.loads((harness.folder / "export/step-00000017/samples.json").read_text())
    mean = sum(each["loss"] for each in samples) / len(samples)
    assert mean == pytest.approx(RecordedRun(run_dir).losses[17], rel=1e-6)
    assert len([*(harness.folder / "export/step-00000017").glob("*.png")]) == 128
    assert sorted(path.stat().st_mtime_ns for path in run_dir.rglob("*")) == before


@pytest.mark.soak  # the quick tests compare losses, which depend on the samples
def test_replayed_samples_are_those_that_the_check_recorded(harness: Harness) -> None:
    program = harness.folder / "program"
    shutil.copytree(ROOT / "apps" / "mnist_ddp", program, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    kept = harness.folder / "kept"
    adapter = ROOT / "tests" / "check" / "program" / "adapter.py"
    options = [*OPTIONS, "--device=cpu", "--max-steps=24", "--global-batch-size=97", "--run-dir=run"]
    done = command(
        harness,
        *("check", "--faults=evaluation", f"--keep={kept}", f"--adapter={adapter}", "--"),
        *(sys.executable, "-m", "samestep", "run", "-n", "2", "--run-dir", "run", "train.py", *options),
        cwd=program,
    )
    assert done.returncode == 0, done
    recorded = Records(kept / "records-2").steps()
    work = kept / "work-1"
    exported = harness.folder / "export"
    words = ["replay", str(work / "run"), "--step=17", "--to=22", f"--export={exported}"]
    refused = command(harness, *words)  # replay refuses a program outside apps/
    assert (refused.returncode, exported.exists()) == (2, False), refused
    done = command(harness, *words, f"--program={work / 'train.py'}")
    assert done.returncode == 0, done
    for step in range(17, 23):
        samples = json.loads((exported / f"step-{step:08d}" / "samples.json").read_text())
        assert sorted(each["sample"] for each in samples) == recorded[step - 1].indices


def test_verify_runs_stretches_again_and_names_a_changed_loss(harness: Harness) -> None:
    """No line of metrics.jsonl has the changed loss, so only the replay detects the change."""
    run_dir = killed_run(harness, "--virtual-ranks=4", "--max-steps=24")
    done = command(harness, "verify", str(run_dir), "--steps=9")
    assert done.returncode == 0, done
    assert done.stdout.count("run again: ") == 2  # from the seed to the checkpoint, and from the checkpoint to the end
    content = bytearray((run_dir / step_losses.NAME).read_bytes())
    content[7 * 16 + 8] ^= 1  # the lowest bit of the loss of step 8
    (run_dir / step_losses.NAME).write_bytes(content)
    done = command(harness, "verify", str(run_dir), "--steps=9")
    assert done.returncode == 1, done
    assert "wrong  steps 1 to 15: the loss of step 8 is " in done.stdout
