"""Hold all images as one uint8 tensor in memory, so that a batch needs one gather and one normalization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from samestep.data import datasets
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """A dataset of images uint8 [n, 1, 28, 28] and labels int64 [n], on the training device."""

    images: Tensor
    labels: Tensor

    def batch(self, indices: NDArray[np.int64], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return samples ``indices`` [m] as normalized images [m, 1, 28, 28] and labels int64 [m]; m may be 0."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        images = self.images.index_select(0, chosen)  # faster than self.images[chosen]
        normalized = images.to(dtype).div_(255).sub_(datasets.MEAN).div_(datasets.STD)
        return normalized, self.labels.index_select(0, chosen)


def load(name: str, data_dir: Path, device: torch.device) -> tuple[Split, Split]:
    """Return the training set and the test set.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    found = datasets.load(name, data_dir)

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        pixels = torch.from_numpy(images).unsqueeze(1)
        classes = torch.from_numpy(labels).long()
        return Split(pixels.to(device), classes.to(device))

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)
