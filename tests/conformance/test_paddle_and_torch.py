"""Compare frameworks: from the same weights, LeNet takes the same steps in Paddle and in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from amounts import amount
from harness import Harness, losses, relative_difference

EXACT = ["--dataset=mnist-5k", "--dtype=float64", "--log-every=1", "--global-batch-size=125", "--epochs=100"]
TORCH = ["--model=lenet", "--dropout=0"]


# Paddle's Momentum holds its coefficient in single precision, which can represent 0.875 but not 0.9.
OPTIMIZERS = {"sgd": ["--lr=0.01", "--momentum=0.875"], "adam": ["--lr=0.001"]}


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.soak), "adam"])
def test_paddle_and_torch_have_the_same_losses(harness: Harness, ddp: Harness, soak: bool, optimizer: str) -> None:
    """Train from PyTorch's weights. PyTorch then evaluates Paddle's trained weights with the same result."""
    options = [*EXACT, f"--optimizer={optimizer}", *OPTIMIZERS[optimizer]]
    start = ddp.train(1, *options, *TORCH, "--max-steps=0", run_dir=ddp.folder / "start")
    steps = amount(soak, few=30 if optimizer == "adam" else 100, many=100)
    options += [f"--init-from={start['run_dir']}/model.safetensors", f"--max-steps={steps}"]
    reference = ddp.train(1, *options, *TORCH)
    expected = losses(ddp.folder / "run")
    assert len(expected) == steps
    assert expected[-1] < expected[0] / 2
    for api in amount(soak, few=("basic",), many=("basic", "fleet", "highlevel")):
        ours = harness.train(2, *options, f"--api={api}", run_dir=harness.folder / api)
        assert relative_difference(expected, losses(harness.folder / api)) < 1e-7, api
        assert ours["test_accuracy"] == reference["test_accuracy"]
    weights = f"--init-from={ours['run_dir']}/model.safetensors"
    back = ddp.train(1, *EXACT, *TORCH, "--max-steps=0", weights, run_dir=ddp.folder / "back")
    assert back["test_loss"] == pytest.approx(ours["test_loss"], rel=1e-9)


@pytest.mark.soak  # the test above compares an evaluation in float64
def test_weights_of_each_program_start_the_others(harness: Harness, ddp: Harness) -> None:
    """Each program evaluates the other's weights. Two of 1,000 predictions may differ, if scores tie."""
    trained = {
        "paddle": harness.train(2, "--dataset=mnist-5k", "--epochs=2"),
        "torch": ddp.train(2, "--dataset=mnist-5k", "--epochs=2", "--optimizer=adam", *TORCH),
    }
    for name, other, options in (("paddle", ddp, TORCH), ("torch", harness, [])):
        weights = Path(trained[name]["run_dir"]) / "model.safetensors"
        evaluate = ["--dataset=mnist-5k", "--max-steps=0", f"--init-from={weights}", *options]
        evaluated = other.train(1, *evaluate, run_dir=other.folder / "other")
        assert evaluated["weights_sha256"] == trained[name]["weights_sha256"]
        assert abs(evaluated["test_accuracy"] - trained[name]["test_accuracy"]) * 1000 <= 2
