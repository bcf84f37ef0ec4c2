"""The data: all images as one uint8 tensor in memory; a batch is one index and one normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from model import Rows
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from samestep import datasets
from samestep.sharding import GlobalBatches
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, 1, 28, 28] and labels int64 [n], on the device that trains."""

    images: Tensor
    labels: Tensor

    def batch(self, indices: NDArray[np.int64], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Samples ``indices`` [m]: normalised images [m, 1, 28, 28] of ``dtype`` and labels int64 [m]; m may be 0."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        images = self.images[chosen].to(dtype).div_(255).sub_(datasets.MEAN).div_(datasets.STD)
        return images, self.labels[chosen]


def load(name: str, data_dir: Path, device: torch.device) -> tuple[Split, Split]:
    """The training and the test set. Raises UserError for a missing or damaged file."""
    found = datasets.load(name, data_dir)

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        return Split(torch.from_numpy(images).unsqueeze(1).to(device), torch.from_numpy(labels).long().to(device))

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)


class Batch(NamedTuple):
    """This rank's part of a global batch, and what of it that is."""

    images: Tensor
    labels: Tensor
    rows: Rows
    step: int  # updates done before this one


class Loader:
    """The steps from ``start`` to ``total``: what Lightning iterates over in place of a DataLoader.

    Its DataLoader would fetch sample by sample. An epoch of Lightning's is all that is left of the run: samples are put
    in order by samestep, which also goes on in the middle of an epoch.
    """

    def __init__(self, split: Split, batches: GlobalBatches, dtype: torch.dtype, start: int, total: int) -> None:
        self.split, self.batches, self.dtype, self.start, self.total = split, batches, dtype, start, total

    def __len__(self) -> int:
        return max(self.total - self.start, 0)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start, self.total):
            images, labels = self.split.batch(self.batches.indices(step), self.dtype)
            yield Batch(images, labels, Rows(self.batches.first_row(step), self.batches.size(step)), step)


class Data(LightningDataModule):
    """samestep's global batches for Lightning's Trainer; evaluation reads the test set itself."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Loader:
        return self.loader
