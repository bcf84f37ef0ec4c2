"""Test that mnist_lightning takes the steps of mnist_ddp, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from amounts import amount
from harness import Harness, losses, recorded, relative_difference


@pytest.mark.soak  # the quick tests compare weights (the test below)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_losses_are_mnist_ddps(harness: Harness, ddp: Harness, n: int) -> None:
    options = [*harness.app.exact, "--global-batch-size=125", "--max-steps=100"]  # neither 2 nor 3 divides 125
    ours = harness.train(n, *options)
    reference = ddp.train(n, *options)
    assert ours["steps"] == reference["steps"] == 100
    assert relative_difference(losses(ddp.folder / "run"), losses(harness.folder / "run")) < 1e-12
    assert ours["test_accuracy"] == reference["test_accuracy"]


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3))])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="defaults"),
        pytest.param(["--model=lenet", "--optimizer=adam"], id="lenet adam", marks=pytest.mark.soak),
    ],
)
def test_the_weights_are_mnist_ddps_to_the_bit(harness: Harness, ddp: Harness, n: int, options: list[str]) -> None:
    """Lightning changes neither the arithmetic nor the records, in float32 with dropout."""
    options = ["--dataset=mnist-5k", "--global-batch-size=251", "--max-steps=20", *options]
    ours = harness.train(n, *options)
    reference = ddp.train(n, *options)
    assert ours["weights_sha256"] == reference["weights_sha256"]
    assert ours["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-12)
    assert list(ours) == list(reference)
    assert ours["test_loss"] == reference["test_loss"]
    assert recorded(harness.folder / "run") == recorded(ddp.folder / "run")


def test_with_virtual_ranks_it_ends_with_the_bits_of_mnist_ddp(harness: Harness, ddp: Harness, soak: bool) -> None:
    """Use one rank, or five in the soak, because the test set has five batches and Lightning refuses an empty rank."""
    options = ["--dataset=mnist-5k", "--global-batch-size=251", "--max-steps=20", "--virtual-ranks=5"]
    ours = harness.train(amount(soak, few=1, many=5), *options)
    reference = ddp.train(1, *options)
    assert ours["weights_sha256"] == reference["weights_sha256"]
    assert recorded(harness.folder / "run") == recorded(ddp.folder / "run")


@pytest.mark.soak  # the quick tests compare weights (a test above)
def test_weights_move_between_the_apps(harness: Harness, ddp: Harness) -> None:
    for source, target in ((ddp, harness), (harness, ddp)):
        trained = source.train(2, "--dataset=mnist-5k", "--max-steps=20", run_dir=source.folder / "trained")
        weights = Path(trained["run_dir"]) / "model.safetensors"
        options = ["--dataset=mnist-5k", "--max-steps=0", f"--init-from={weights}"]
        started = target.train(2, *options, run_dir=target.folder / "started")
        assert started["weights_sha256"] == trained["weights_sha256"]
        assert started["test_accuracy"] == trained["test_accuracy"]
