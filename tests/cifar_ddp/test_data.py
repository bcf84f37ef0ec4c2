"""Test how the app reads gray images in Fashion-MNIST's format, and images of other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import options_of, told_by
from samestep import ConfigError

GRAY = """
import json
import sys
from pathlib import Path

import data
import numpy as np
import torch
from options import parse
from samestep.data import datasets

folder = Path("{folder}")
stored = datasets.load("fashion-mnist", folder)
options = parse(["--dataset=fashion-mnist", "--dtype=float64", "--no-augment", f"--data-dir={{folder}}"])
training, test = data.load(options, torch.device("cpu"))
images = training.images.numpy()
told = dict(shape=list(images.shape), test=len(test.labels))
told["inside"] = all((images[:, 2:30, 2:30, k] == stored.train_images).all() for k in range(3))
told["edge"] = int(images.sum()) == 3 * int(stored.train_images.sum())
told["labels"] = bool((training.labels.numpy() == stored.train_labels).all())
batch, _ = training.batch(np.arange(600))
expected = ((images / 255 - 0.286) / 0.353).transpose(0, 3, 1, 2)
told["normalised"] = float(np.abs(batch.numpy() - expected).max())

print(json.dumps(told))
"""


def offers_fashion_mnist() -> bool:
    """Return whether --dataset=fashion-mnist is among the app's choices."""
    try:
        options_of("cifar_ddp").parse(["--dataset=fashion-mnist"])
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not offers_fashion_mnist(), reason="options.py has another dataset: test how data.py reads that")
def test_gray_images_are_padded_and_normalised(data_dir: Path) -> None:
    output = told_by("cifar_ddp", GRAY.format(folder=data_dir))
    assert (output["shape"], output["test"]) == ([600, 32, 32, 3], 200)
    assert output["inside"]
    assert output["edge"], "the border is not background"
    assert output["labels"]
    assert output["normalised"] < 1e-12


SIZES = """
import json
import sys
import numpy as np
from data import to_rgb
from samestep import ConfigError

told = []
for shape in json.loads(sys.argv[1]):
    try:
        told.append([*to_rgb(np.zeros((2, *shape), np.uint8)).shape])
    except ConfigError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_images_of_another_size_are_rejected() -> None:
    """With other sizes, --input loader and memory would crop different images."""
    accepted, *sizes = [30, 30], [27, 27], [28, 20], [40, 40], [64, 64, 3], [32, 32, 1], [784]
    shape, *errors = told_by("cifar_ddp", SIZES, [accepted, *sizes])
    assert shape == [2, 32, 32, 3]
    for error, size in zip(errors, sizes, strict=True):
        assert error.startswith(f"images of shape {size} cannot be padded to [32, 32, 3]: resize the images")
