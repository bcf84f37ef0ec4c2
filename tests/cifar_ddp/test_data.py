"""Gray images: Fashion-MNIST's format as the app has it, and the benchmark on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT, told_by, write_idx


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A small data set of noise in Fashion-MNIST's format."""
    random = np.random.default_rng(0)
    (tmp_path / "fashion-mnist").mkdir()
    for split, count in (("train", 600), ("t10k", 200)):
        images, labels = random.integers(0, 256, (count, 28, 28)), random.integers(0, 10, count)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            write_idx(tmp_path / "fashion-mnist" / f"{split}-{kind}-ubyte.gz", array.astype(np.uint8))
    return tmp_path


GRAY = """
import json
import sys
from pathlib import Path

import data
import numpy as np
import torch
from samestep import datasets

folder = Path("{folder}")
stored = datasets.load("fashion-mnist", folder)
training, test = data.load("fashion-mnist", folder, torch.device("cpu"))
images = training.images.numpy()
told = dict(shape=list(images.shape), test=len(test.labels))
told["inside"] = all((images[:, 2:30, 2:30, k] == stored.train_images).all() for k in range(3))
told["edge"] = int(images.sum()) == 3 * int(stored.train_images.sum())
told["labels"] = bool((training.labels.numpy() == stored.train_labels).all())
batch, _ = training.batch(np.arange(600), torch.float64)
expected = ((images / 255 - 0.286) / 0.353).transpose(0, 3, 1, 2)
told["normalised"] = float(np.abs(batch.numpy() - expected).max())

print(json.dumps(told))
"""


def test_gray_images_are_padded_and_normalised(data_dir: Path) -> None:
    told = told_by("cifar_ddp", GRAY.format(folder=data_dir))
    assert (told["shape"], told["test"]) == ([600, 32, 32, 3], 200)
    assert told["inside"]
    assert told["edge"], "the border is not background"
    assert told["labels"]
    assert told["normalised"] < 1e-12


@pytest.mark.parametrize(
    ("way", "rows"),
    [([], 2), *(pytest.param([way], 1, marks=pytest.mark.soak) for way in ("--inputs", "--shares"))],
)
def test_the_benchmark_still_runs(data_dir: Path, way: list[str], rows: int) -> None:
    """Four steps of the app and of what is beside it, whose numbers are of no meaning."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "time_to_accuracy.py"), "--quick", f"--data-dir={data_dir}", *way],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") > rows
