"""Compare frameworks: from the same weights, ResNet-50 takes the same steps in MindSpore and in PyTorch.

Batch normalization is frozen, because MindSpore normalizes over each rank's samples, but cifar_ddp does not.
Both programs use the same crops and flips, which depend on the sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import Harness, losses, relative_difference

SAME = ["--dataset=synthetic-cifar10", "--freeze-bn", "--lr=1e-4", "--momentum=0", "--log-every=1"]
SAME += ["--global-batch-size=8", "--max-steps=3"]
PLAIN = ("--stem=imagenet", "--dropout=0", "--label-smoothing=0", "--weight-decay=0", "--schedule=constant")
RESNETS = {"resnet50": "--depth=50", "resnet18": "--depth=18"}


@pytest.mark.parametrize("name", [pytest.param("resnet50", marks=pytest.mark.soak), "resnet18"])
def test_mindspore_and_torch_have_the_same_losses_and_evaluate_each_others_weights(
    harness: Harness, cifar: Harness, soak: bool, name: str
) -> None:
    """The quick tests evaluate MindSpore's weights in PyTorch, but not PyTorch's weights in MindSpore."""
    options = {cifar: [*SAME, *PLAIN, f"--model={name}"], harness: [*SAME, RESNETS[name]]}
    start = cifar.train(1, *options[cifar], "--max-steps=0", run_dir=cifar.folder / "start")
    trained: dict[Harness, dict[str, Any]] = {}
    for app in (cifar, harness):
        trained[app] = app.train(1, *options[app], f"--init-from={start['run_dir']}/model.safetensors")
    ours = losses(harness.folder / "run")
    reference = losses(cifar.folder / "run")
    assert relative_difference(reference, ours) < 1e-4, (ours, reference)
    pairs = [(harness, cifar), (cifar, harness)]
    for app, other in amount(soak, few=pairs[:1], many=pairs):
        weights = Path(trained[app]["run_dir"]) / "model.safetensors"
        alone = ["--evaluate-only", f"--init-from={weights}"]
        outcome = other.run(1, *options[other], *alone, run_dir=other.folder / "other")
        assert outcome.code == 0, outcome
        found = outcome.result
        assert found["weights_sha256"] == trained[app]["weights_sha256"]
        assert abs(found["test_accuracy"] - trained[app]["test_accuracy"]) * found["test_examples"] <= 2
        assert found["test_loss"] == pytest.approx(trained[app]["test_loss"], rel=1e-4)
