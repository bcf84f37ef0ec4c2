"""The data: all images as one uint8 tensor in memory; a batch is one index, crops and flips, one normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from augment import crop_and_flip
from numpy.typing import NDArray
from samestep import datasets
from torch import Tensor

# Mean and standard deviation of training pixels, scaled to [0, 1]: red, green, blue. CIFAR-10's second are those that
# most programs have, resnet50_mindspore among them: the mean over images of each one's own.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "fashion-mnist": ((0.2860,) * 3, (0.3530,) * 3),
}
SIDE = 32


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, 32, 32, 3] and labels int64 [n], on the device that trains; ``mean`` and ``std`` [3]."""

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def batch(
        self, indices: NDArray[np.int64], dtype: torch.dtype, augment: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Samples ``indices`` [m]: normalised images [m, 3, 32, 32] of ``dtype`` and labels int64 [m]; m may be 0.

        With ``augment``, a seed and an epoch, cropped and flipped. The images are channels last in memory, as stored.
        """
        chosen = torch.from_numpy(indices).to(self.images.device)
        images = self.images[chosen]
        if augment:
            images = crop_and_flip(images, indices, *augment)
        images = images.to(dtype).div_(255).sub_(self.mean.to(dtype)).div_(self.std.to(dtype))
        return images.permute(0, 3, 1, 2), self.labels[chosen]


def load(name: str, data_dir: Path, device: torch.device) -> tuple[Split, Split]:
    """The training and the test set. Raises UserError for a missing or damaged file."""
    found = datasets.load(name, data_dir)
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in STATISTICS[name.removeprefix("synthetic-")])

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        if images.ndim == 3:  # gray: the same in three channels, with an edge of background
            edge = (SIDE - images.shape[1]) // 2
            images = np.pad(images, ((0, 0), (edge, edge), (edge, edge)))[..., None].repeat(3, axis=3)
        arrays = torch.from_numpy(images), torch.from_numpy(labels).long()
        return Split(*(tensor.to(device) for tensor in (*arrays, mean, std)))

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)
