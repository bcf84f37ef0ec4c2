"""The dataset for this app's tests of gray images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import write_idx


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return the folder of a small dataset of noise in Fashion-MNIST's format."""
    random = np.random.default_rng(0)
    (tmp_path / "fashion-mnist").mkdir()
    for split, count in (("train", 600), ("t10k", 200)):
        images = random.integers(0, 256, (count, 28, 28))
        labels = random.integers(0, 10, count)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            write_idx(tmp_path / "fashion-mnist" / f"{split}-{kind}-ubyte.gz", array.astype(np.uint8))
    return tmp_path
