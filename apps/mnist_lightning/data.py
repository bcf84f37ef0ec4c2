"""The data: all images as one uint8 tensor in memory; a batch is one index and one normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from samestep import datasets
from samestep.run import Run
from samestep.sharding import GlobalBatches, Rows, shard
from torch import Tensor

EVALUATION_BATCH = 1000  # images at a time; of no influence on the result


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, 1, 28, 28] and labels int64 [n], on the device that trains."""

    images: Tensor
    labels: Tensor

    def batch(self, indices: NDArray[np.int64], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Samples ``indices`` [m]: normalised images [m, 1, 28, 28] of ``dtype`` and labels int64 [m]; m may be 0."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        images, labels = self.images.index_select(0, chosen), self.labels.index_select(0, chosen)  # [chosen] is slower
        return images.to(dtype).div_(255).sub_(datasets.MEAN).div_(datasets.STD), labels


def load(name: str, data_dir: Path, device: torch.device) -> tuple[Split, Split]:
    """The training and the test set. Raises UserError for a missing or damaged file."""
    found = datasets.load(name, data_dir)

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        return Split(torch.from_numpy(images).unsqueeze(1).to(device), torch.from_numpy(labels).long().to(device))

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)


class Batch(NamedTuple):
    """This rank's shard of a global batch, and what of it that is."""

    images: Tensor
    labels: Tensor
    rows: Rows
    step: int  # updates done before this one


Item = TypeVar("Item")


class Loader(Generic[Item]):
    """``make(number)`` for each of ``numbers``: whole batches, in place of a DataLoader's sample by sample."""

    def __init__(self, make: Callable[[int], Item], numbers: range) -> None:
        self.make, self.numbers = make, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Item]:
        return map(self.make, self.numbers)


class Data(LightningDataModule):
    """samestep's global batches, an epoch at a time, and this rank's shard of the test set."""

    def __init__(self, run: Run, batches: GlobalBatches, training: Split, test: Split, dtype: torch.dtype) -> None:
        super().__init__()
        self.run, self.batches, self.training, self.test, self.dtype = run, batches, training, test, dtype

    def train_dataloader(self) -> Loader[Batch]:
        """The steps of Lightning's current epoch, less those done before this process and those after the run's stop.

        Lightning asks anew at each epoch (``reload_dataloaders_every_n_epochs``) and validates at the end of each.
        """
        assert self.trainer is not None
        first = self.trainer.current_epoch * self.batches.steps_per_epoch
        last = first + self.batches.steps_per_epoch
        return Loader(self.train_batch, range(max(first, self.run.start), min(last, self.run.stop)))

    def train_batch(self, step: int) -> Batch:
        self.run.phases.begin()
        images, labels = self.training.batch(self.batches.indices(step), self.dtype)
        return Batch(images, labels, self.batches.rows(step), step)

    def val_dataloader(self) -> Loader[tuple[Tensor, Tensor]]:
        """This rank's shard of the test set, which may be a batch longer or shorter than another's."""
        indices = np.arange(*shard(len(self.test.labels), self.batches.rank, self.batches.world_size))

        def batch(begin: int) -> tuple[Tensor, Tensor]:
            return self.test.batch(indices[begin : begin + EVALUATION_BATCH], self.dtype)

        return Loader(batch, range(0, len(indices), EVALUATION_BATCH))
