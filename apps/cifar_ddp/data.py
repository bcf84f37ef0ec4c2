"""Read the same batches in two ways: by one index into a uint8 tensor in memory, or by a DataLoader with workers."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from augment import PADDING, choices, crop_and_flip
from numpy.typing import NDArray
from samestep.data import datasets
from samestep.options import Options
from samestep.sharding import GlobalBatches
from torch import Tensor
from torch.utils.data import DataLoader
from vision import VisionDataset, functional

# Mean and standard deviation of training pixels, scaled to [0, 1]: red, green, blue. The deviations
# are the means of each image's own deviation, as in most programs for CIFAR-10.
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
        """Return samples ``indices`` [m] as normalized images [m, 3, 32, 32] and labels int64 [m]; m may be 0.

        With ``augment``, a seed and an epoch, it crops and flips. The images are channels last in memory, as stored.
        """
        chosen = torch.from_numpy(indices).to(self.images.device)
        images = self.images[chosen]
        if augment:
            images = crop_and_flip(images, indices, *augment)
        return self.normalize(images, dtype), self.labels[chosen]

    def normalize(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Map images uint8 [m, 32, 32, 3] to normalized images [m, 3, 32, 32] of ``dtype``."""
        images = images.to(dtype).div_(255).sub_(self.mean.to(dtype)).div_(self.std.to(dtype))
        return images.permute(0, 3, 1, 2)


def no_empty_shards(batches: GlobalBatches, step: int) -> bool:
    """Return whether every rank has samples in each micro-batch of the step."""
    return batches.size(step) // batches.num_micro_batches(step) >= batches.world_size


def batches_of(
    options: Options, training: Split, batches: GlobalBatches, steps: range, dtype: torch.dtype
) -> Generator[tuple[Tensor, Tensor]]:
    """Yield this rank's shard of each micro-batch of ``steps``, as `Split.batch` returns them."""
    if options.input == "loader":
        yield from _load(options, training, batches, steps, dtype)
        return
    for step, indices in _indices(batches, steps):
        yield training.batch(indices, dtype, (options.seed, batches.epoch(step)) if options.augment else None)


def _indices(batches: GlobalBatches, steps: range) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for step in steps:
        for micro_batch in batches.micro_batches(step):
            yield step, batches.indices(step, micro_batch)


Key = tuple[int, int]  # an epoch, and the index of a sample


class Samples(VisionDataset):  # type: ignore[misc]  # mypy runs without torchvision
    """Return one sample at a time. For a dataset that does not fit into memory, read a file here instead."""

    def __init__(self, options: Options, training: Split) -> None:
        super().__init__()
        self._seed, self._augment, self._training = options.seed, options.augment, training

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        """Return an image uint8 [3, 32, 32] and its label. (seed, epoch, index) decide crop and flip, in any worker."""
        epoch, index = key
        image = self._training.images[index].permute(2, 0, 1)
        if self._augment:
            top, left, flipped = (each.item() for each in choices(np.array([index]), self._seed, epoch))
            image = functional.crop(functional.pad(image, [PADDING]), top, left, SIDE, SIDE)
            image = functional.horizontal_flip(image) if flipped else image
        return image, self._training.labels[index]


def _collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return images uint8 [m, 32, 32, 3] and labels int64 [m]; m may be 0, which torch's own collate rejects."""
    if not samples:
        return torch.empty(0, SIDE, SIDE, 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    images, labels = zip(*samples)
    return torch.stack(images).permute(0, 2, 3, 1), torch.stack(labels)


def _load(
    options: Options, training: Split, batches: GlobalBatches, steps: range, dtype: torch.dtype
) -> Generator[tuple[Tensor, Tensor]]:
    """Yield batches that workers load. The keys define the order, so that a resume starts at its first key."""
    device = training.labels.device
    keys = ([(batches.epoch(step), int(i)) for i in indices] for step, indices in _indices(batches, steps))
    on_cpu = Split(*(tensor.cpu() for tensor in (training.images, training.labels, training.mean, training.std)))
    samples = Samples(options, on_cpu)
    for images, labels in DataLoader(samples, batch_sampler=keys, num_workers=options.workers, collate_fn=_collate):
        yield training.normalize(images.to(device), dtype), labels.to(device)


def load(name: str, data_dir: Path, device: torch.device) -> tuple[Split, Split]:
    """Return the training and the test set. Raises ConfigError for a missing or damaged file."""
    found = datasets.load(name, data_dir)
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in STATISTICS[name.removeprefix("synthetic-")])

    def split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
        if images.ndim == 3:  # gray: repeat it in three channels, with a border of background
            edge = (SIDE - images.shape[1]) // 2
            images = np.pad(images, ((0, 0), (edge, edge), (edge, edge)))[..., None].repeat(3, axis=3)
        arrays = torch.from_numpy(images), torch.from_numpy(labels).long()
        return Split(*(tensor.to(device) for tensor in (*arrays, mean, std)))

    return split(found.train_images, found.train_labels), split(found.test_images, found.test_labels)
