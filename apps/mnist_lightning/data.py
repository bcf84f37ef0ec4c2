"""Hold all images as one uint8 tensor in memory: a batch is one index and one normalization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from samestep.data import datasets
from samestep.run import Run
from samestep.sharding import BatchSlice, GlobalBatches, eval_batches, shard
from samestep.step_timer import INPUT
from torch import Tensor

EVAL_BATCH_SIZE = 250  # at most; ranks take whole batches, which are the same at any number of ranks


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, 1, 28, 28] and labels int64 [n], on the device that trains."""

    images: Tensor
    labels: Tensor

    def batch(self, indices: NDArray[np.int64], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return samples ``indices`` [m] as normalized images [m, 1, 28, 28] and labels int64 [m]; m may be 0."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        images, labels = self.images.index_select(0, chosen), self.labels.index_select(0, chosen)  # [chosen] is slower
        return images.to(dtype).div_(255).sub_(datasets.MEAN).div_(datasets.STD), labels


def load(name: str, data_dir: Path, device: torch.device) -> tuple[Split, Split]:
    """Return the training and the test set. Raises ConfigError for a missing or damaged file."""
    found = datasets.load(name, data_dir)

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        return Split(torch.from_numpy(images).unsqueeze(1).to(device), torch.from_numpy(labels).long().to(device))

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)


class MicroBatch(NamedTuple):
    """A part of a global batch, and its place in it."""

    images: Tensor
    labels: Tensor
    rows: BatchSlice
    number: tuple[int, int]  # k, and the number of micro-batches in the global batch


class Batch(NamedTuple):
    """This rank's shard of a global batch, or, with --virtual-ranks, its sub-shards, if any."""

    step: int  # updates done before this one
    micro_batches: list[MicroBatch]


Item = TypeVar("Item")


class Loader(Generic[Item]):
    """Yield ``make(number)`` for each of ``numbers``: whole batches, where a DataLoader would take sample by sample."""

    def __init__(self, make: Callable[[int], Item], numbers: range) -> None:
        self.make, self.numbers = make, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Item]:
        return map(self.make, self.numbers)


class Data(LightningDataModule):
    """Load samestep's global batches, an epoch at a time, and this rank's shard of the test set."""

    def __init__(self, run: Run, batches: GlobalBatches, train_set: Split, test_set: Split, dtype: torch.dtype) -> None:
        super().__init__()
        self.run, self.batches, self.train_set, self.test_set, self.dtype = run, batches, train_set, test_set, dtype
        # The batches of all ranks. Lightning raises an error on a rank that has none.
        parts = batches.virtual_ranks or batches.world_size
        self.val_batches = eval_batches(len(test_set.labels), EVAL_BATCH_SIZE, parts)

    def train_dataloader(self) -> Loader[Batch]:
        """Return the steps of Lightning's current epoch, from the run's first step to its last.

        Lightning asks again at each epoch (``reload_dataloaders_every_n_epochs``) and validates at the end of each.
        """
        assert self.trainer is not None
        first = self.trainer.current_epoch * self.batches.steps_per_epoch
        last = first + self.batches.steps_per_epoch
        return Loader(self.train_batch, range(max(first, self.run.first_step), min(last, self.run.last_step)))

    def train_batch(self, step: int) -> Batch:
        with self.run.timer.phase(INPUT):
            return Batch(step, [self.micro_batch(step, number) for number in self.batches.micro_batches(step)])

    def micro_batch(self, step: int, number: tuple[int, int]) -> MicroBatch:
        images, labels = self.train_set.batch(self.batches.indices(step, number), self.dtype)
        return MicroBatch(images, labels, self.batches.rows(step, number), number)

    def val_dataloader(self) -> Loader[tuple[int, Tensor, Tensor]]:
        """Return this rank's batches of the test set, with their numbers; another rank may have one more or less."""

        def batch(k: int) -> tuple[int, Tensor, Tensor]:
            return k, *self.test_set.batch(self.val_batches[k], self.dtype)

        return Loader(batch, range(*shard(len(self.val_batches), self.batches.rank, self.batches.world_size)))
