"""Run torchvision's ResNet-50 in a separate process. test_depth_50.py starts this program and mindspore_side.py.

    python torchvision_side.py make FOLDER      # write weights to torchvision-32.safetensors and evaluate them
    python torchvision_side.py compare FOLDER   # compare the files of mindspore_side.py with torchvision

The last line of output is the result in JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "loops"))
importlib.import_module("common").torchvision_that_imports()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from samestep.data import datasets  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torchvision.models import resnet50  # noqa: E402

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)  # mean and standard deviation of CIFAR-10's red, green and blue


def loaded(arrays: dict[str, Tensor]) -> nn.Module:
    model: nn.Module = resnet50(num_classes=10)
    model.load_state_dict(arrays, strict=True)
    return model


def normalised(images: NDArray[np.uint8]) -> Tensor:
    """Return images, uint8 [n, 32, 32, 3], as inputs of the model, float32 [n, 3, 32, 32]."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std


def evaluated(weights: Path) -> dict[str, float]:
    """Return the loss and the accuracy over the test set."""
    model = loaded(load_file(weights))
    data = datasets.load("synthetic-cifar10", weights.parent)
    labels = torch.from_numpy(data.test_labels).long()
    with torch.no_grad():
        logits = model.eval()(normalised(data.test_images)).double()
    accuracy = (logits.argmax(1) == labels).double().mean()
    return {"test_loss": cross_entropy(logits, labels).item(), "test_accuracy": accuracy.item()}


def make(folder: Path) -> dict[str, float]:
    """Save torchvision's initial weights with the running statistics of three batches, and evaluate them."""
    data = datasets.load("synthetic-cifar10", folder)
    torch.manual_seed(7)
    model = resnet50(num_classes=10)
    with torch.no_grad():
        for images in np.split(data.train_images[:96], 3):
            model(normalised(images))
    save_file(model.state_dict(), folder / "torchvision-32.safetensors")
    return evaluated(folder / "torchvision-32.safetensors")


def compare(folder: Path) -> dict[str, Any]:
    """Return the largest relative difference of logits by file, an evaluation, and the values of `first_step`."""
    output: dict[str, Any] = {"logits": {}, "evaluated": evaluated(folder / "trained-32.safetensors")}
    for weights in folder.glob("*-*.safetensors"):
        model = loaded(load_file(weights))
        apps = load_file(folder / "told" / weights.name)
        with torch.no_grad():
            logits = model.eval()(apps["images"])
        output["logits"][weights.stem] = ((logits - apps["logits"]).abs().max() / logits.abs().max()).item()
    return output | first_step(folder)


def first_step(folder: Path) -> dict[str, Any]:
    """Take the app's first step at 224 x 224 with torch. Return the loss, and the app's relative error of each array.

    An error is the 2-norm of the difference over the 2-norm of the array's change in the step. torch uses float64.
    """
    before = load_file(folder / "told" / "first-step.safetensors")
    images = before.pop("images").double()
    labels = before.pop("labels").long()
    model = loaded(before).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    found = load_file(folder / "trained-224.safetensors")
    off = {
        name: ((found[name] - after).norm() / (after - before[name]).norm()).item()
        for name, after in model.state_dict().items()
        if after.is_floating_point()
    }
    return {"loss": loss.item(), "off": off}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"make": make, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))))
