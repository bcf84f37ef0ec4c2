"""Hold all images as one uint8 tensor in memory, so that a batch needs one gather and one normalization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from samestep.data import datasets
from samestep.run import Run
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler
from torch import Tensor
from torch.utils.data import Dataset

EVAL_BATCH_SIZE = 250  # largest evaluation batch of a rank, in examples


class Split(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of images uint8 [n, 1, 28, 28] and labels int64 [n], on the training device.

    A `samestep.torch.DataLoader` reads each batch by one call of `batch`.
    """

    def __init__(self, images: Tensor, labels: Tensor, dtype: torch.dtype) -> None:
        """Create the dataset. ``dtype`` is the type of a batch's images."""
        self.images = images
        self.labels = labels
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return samples ``indices`` [m] as normalized images [m, 1, 28, 28] and labels int64 [m]; m may be 0."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        images = self.images.index_select(0, chosen)  # faster than self.images[chosen]
        normalized = images.to(self.dtype).div_(255).sub_(datasets.MEAN).div_(datasets.STD)
        return normalized, self.labels.index_select(0, chosen)

    __getitems__ = batch  # a DataLoader calls this method


def load(name: str, data_dir: Path, device: torch.device, dtype: torch.dtype) -> tuple[Split, Split]:
    """Return the training set and the test set.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    found = datasets.load(name, data_dir)

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        pixels = torch.from_numpy(images).unsqueeze(1)
        return Split(pixels.to(device), torch.from_numpy(labels).long().to(device), dtype)

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)


class Batches:
    """An iterable of the next ``count`` batches, with the length that Lightning requires."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self.batches = batches
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, self.count)


class Data(LightningDataModule):
    """Provide this rank's shards of each epoch's global batches, and this rank's blocks of the test set."""

    def __init__(
        self, run: Run, sampler: GlobalBatchSampler, eval_sampler: EvalSampler, train_set: Split, test_set: Split
    ) -> None:
        super().__init__()
        self.run = run
        self.sampler = sampler
        self.eval_sampler = eval_sampler
        self.batches = run.batches(DataLoader(train_set, batch_sampler=sampler, seeded=False))  # up to the last step
        self.eval_loader = DataLoader(test_set, batch_sampler=eval_sampler, seeded=False)

    def train_dataloader(self) -> Batches:
        """Return the batches of Lightning's current epoch that lie between the run's first and last step.

        Lightning calls this method per epoch (``reload_dataloaders_every_n_epochs``), and validates after each epoch.
        """
        assert self.trainer is not None
        epoch_begin = self.trainer.current_epoch * len(self.sampler)
        first = max(epoch_begin, self.run.first_step)
        last = min(epoch_begin + len(self.sampler), self.run.last_step)
        return Batches(self.batches, last - first)

    def val_dataloader(self) -> Batches:
        """Return this rank's blocks of the test set, as batches. Ranks may differ by one in their numbers of blocks."""
        return Batches(self.eval_loader, len(self.eval_sampler))
