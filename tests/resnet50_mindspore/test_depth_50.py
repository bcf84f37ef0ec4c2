"""Test ResNet-50 at 32 and 224 pixels: training, resume, and the same logits and step as torchvision's.

MindSpore and torch run in separate processes: mindspore_side.py and torchvision_side.py. In the quick tests,
tests/conformance compares the training with cifar_ddp.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, losses
from samestep import checkpoint

pytestmark = pytest.mark.soak

# In the last layers, each of a rank's four images has one pixel, so the default rate would make the weights explode.
TRAINED = ["--depth=50", "--image-size=32", "--global-batch-size=8", "--lr=1e-3", "--max-steps=2"]
TRAINED += ["--checkpoint-every=1"]
LARGE = ["--dataset=synthetic-cifar10", "--image-size=224", "--global-batch-size=2", "--max-steps=1", "--log-every=1"]


def side(harness: Harness, program: str, *arguments: str) -> str:
    """Run torchvision_side.py or mindspore_side.py, and return its stdout."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    outcome = harness.start_command(command, harness.folder, GLOG_v="3").finish()
    assert outcome.code == 0, outcome
    return outcome.stdout


def test_a_resumed_run_ends_with_the_same_weights(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    reference = undisturbed(2, *TRAINED)
    run_dir = harness.folder / "run"
    shutil.copytree(reference["run_dir"], run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000002")
    for name in ("model.safetensors", "result.json"):
        (run_dir / name).unlink()
    result = harness.train(2, *harness.app.small, *TRAINED)
    assert (result["resumed_from_step"], result["steps"]) == (1, 2)
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert (result["test_loss"], result["train_loss"]) == (reference["test_loss"], reference["train_loss"])
    assert losses(run_dir) == losses(Path(reference["run_dir"]))
    layout = checkpoint.load_weights(run_dir / "model.safetensors")
    assert sum(array.size for name, array in layout.items() if name.endswith(("weight", "bias"))) == 23_528_522


def test_it_is_torchvisions_resnet50(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Load the app's trained weights in torchvision, and start the app from torchvision's weights.

    Logits in eval mode may differ by 1e-4 of the largest logit. A measured difference is 2e-6.
    """
    folder = harness.folder / "sides"
    folder.mkdir()
    large = harness.start(1, *LARGE, run_dir=harness.folder / "224")  # this run's evaluation takes most of the time

    expected = json.loads(side(harness, "torchvision_side.py", "make", str(folder)).splitlines()[-1])
    other = folder / "torchvision-32.safetensors"
    started = harness.train(
        1, "--dataset=synthetic-cifar10", f"--init-from={other}", "--max-steps=0", run_dir=harness.folder / "started"
    )
    given, kept = (checkpoint.load_weights(path) for path in (other, Path(started["run_dir"]) / "model.safetensors"))
    assert given.keys() == kept.keys()
    assert all(given[name].tobytes() == kept[name].tobytes() for name in given)
    assert started["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-4)
    assert started["test_accuracy"] == pytest.approx(expected["test_accuracy"], abs=1e-4)

    trained = undisturbed(2, *TRAINED)
    larger = harness.checked(large.finish(limit=600), 1)
    assert (larger["steps"], larger["global_batch_size"], larger["train_examples"]) == (1, 2, 1024)
    assert larger["train_loss"] == losses(harness.folder / "224")[0]
    for name, result in (("trained-32", trained), ("trained-224", larger)):
        shutil.copy(Path(result["run_dir"]) / "model.safetensors", folder / f"{name}.safetensors")
    side(harness, "mindspore_side.py", str(folder))
    reported = json.loads(side(harness, "torchvision_side.py", "compare", str(folder)).splitlines()[-1])
    assert reported["logits"].keys() == {"torchvision-32", "trained-32", "trained-224"}
    assert max(reported["logits"].values()) < 1e-4, reported["logits"]
    assert trained["test_loss"] == pytest.approx(reported["evaluated"]["test_loss"], rel=1e-4)
    assert trained["test_accuracy"] == pytest.approx(reported["evaluated"]["test_accuracy"], abs=1 / 256)

    # Compare the step at 224 pixels. Rounding grows toward the first layers, where torch's float32 is also 2% off.
    assert losses(harness.folder / "224")[0] == pytest.approx(reported["loss"], rel=1e-5)
    assert max(reported["off"].values()) < 0.1, reported["off"]
    last = {name: off for name, off in reported["off"].items() if name.startswith("fc.") or "running" in name}
    assert max(last.values()) < 1e-3, last


def test_weights_that_explode_in_the_first_step_overflow_in_the_evaluation_alone(harness: Harness) -> None:
    """torchvision's model overflows, too: with these weights, its logits are 2e39 in float64 and NaN in float32."""
    options = ["--dataset=synthetic-cifar10", "--global-batch-size=4", "--lr=0.05", "--max-steps=1"]
    outcome = harness.run(1, *options)
    result = harness.checked(outcome, 1)
    assert (result["steps"], result["restarts"], result["test_loss"]) == (1, 1, None)
    assert sum(line.startswith("warning: at step 1 the test loss is nan") for line in outcome.stderr.splitlines()) == 1
