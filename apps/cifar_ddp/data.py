"""Read batches from a tensor of all images, or sample by sample in worker processes. The batches are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from augment import PADDING, choices, crop_and_flip
from numpy.typing import NDArray
from samestep import ConfigError
from samestep.data import datasets
from samestep.options import Options
from samestep.torch import DataLoader, GlobalBatchSampler
from samestep.torch.samplers import IndexArray
from torch import Tensor
from torch.utils.data import Dataset
from vision import functional

# Mean and standard deviation of training pixels, scaled to [0, 1]: red, green, blue. The deviations of cifar10
# are means of the deviations within single images, as in most programs for CIFAR-10.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "fashion-mnist": ((0.2860,) * 3, (0.3530,) * 3),
}
SIDE = 32


@dataclass(frozen=True, eq=False)
class Split(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of images uint8 [n, 32, 32, 3] and labels int64 [n], on one device.

    A `samestep.torch.DataLoader` reads each batch by one call of `batch`.

    Attributes:
        mean, std: statistics [3] of the training pixels, by which images are normalized.
        dtype: type of a batch's images.
        augment_seed: seed of random crops and flips; None for no augmentation.
    """

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    dtype: torch.dtype
    augment_seed: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: IndexArray) -> tuple[Tensor, Tensor]:
        """Return samples ``indices`` [m] as normalized images [m, 3, 32, 32] and labels int64 [m]; m may be 0.

        The images are in the channels-last memory format.
        """
        chosen = torch.from_numpy(indices).to(self.images.device)
        images = self.images[chosen]
        if self.augment_seed is not None:
            images = crop_and_flip(images, indices, self.augment_seed, epoch=indices.epoch)
        return self.normalize(images), self.labels[chosen]

    __getitems__ = batch  # a DataLoader calls this method

    def normalize(self, images: Tensor) -> Tensor:
        """Map images uint8 [m, 32, 32, 3] to normalized images [m, 3, 32, 32]."""
        mean = self.mean.to(self.dtype)
        std = self.std.to(self.dtype)
        normalized = images.to(self.dtype).div_(255).sub_(mean).div_(std)
        return normalized.permute(0, 3, 1, 2)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that reads one sample at a time. If your data exceed the memory, make `read` load a file."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, indices: IndexArray) -> list[tuple[Tensor, Tensor]]:
        """Return the samples of a batch. A DataLoader calls this method."""
        return [self.read(index, indices.epoch) for index in indices.tolist()]

    def read(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return an image uint8 [3, 32, 32] and its label. An ``augment_seed`` enables random crops and flips."""
        split = self._split
        image = split.images[index].permute(2, 0, 1)
        if split.augment_seed is not None:
            top, left, flipped = (each.item() for each in choices(np.array([index]), split.augment_seed, epoch))
            padded = functional.pad(image, [PADDING])
            image = functional.crop(padded, top, left, SIDE, SIDE)
            if flipped:
                image = functional.horizontal_flip(image)
        return image, split.labels[index]

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the images and labels of ``samples`` as one batch, in the format of `Split.batch`."""
        images, labels = zip(*samples)
        channels_last = torch.stack(images).permute(0, 2, 3, 1).contiguous()
        return self._split.normalize(channels_last), torch.stack(labels)


def make_loader(options: Options, train_set: Split, sampler: GlobalBatchSampler) -> DataLoader:
    """Return the loader that --input selects. Every choice of --input yields the same batches."""
    if options.input == "memory":
        return DataLoader(train_set, batch_sampler=sampler)
    samples = Samples(train_set)
    return DataLoader(
        samples,
        batch_sampler=sampler,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        collate_fn=samples.collate,
    )


def no_empty_shards(sampler: GlobalBatchSampler, step: int) -> bool:
    """Return whether every rank has at least one sample in each micro-batch of update ``step``."""
    batches = sampler.batches
    smallest = batches.size(step) // batches.num_micro_batches(step)
    return smallest >= batches.world_size


def to_rgb(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images [n, 32, 32, 3]. Gray images [n, s, s] get a black border and three equal channels.

    Raises:
        ConfigError: the images have another size. A crop of --input loader would then differ from one of memory.
    """
    given = images.shape[1:]
    if images.ndim == 3:
        edge = max(0, SIDE - images.shape[1]) // 2
        padded = np.pad(images, ((0, 0), (edge, edge), (edge, edge)))
        images = padded[..., None].repeat(3, axis=3)
    if images.shape[1:] != (SIDE, SIDE, 3):
        raise ConfigError(
            f"images of shape {[*given]} cannot be padded to [{SIDE}, {SIDE}, 3]: resize the images, or change SIDE in "
            "data.py"
        )
    return images


def load(options: Options, device: torch.device) -> tuple[Split, Split]:
    """Return the training set and the test set. The training set stays on the CPU with --input loader.

    Raises:
        ConfigError: a file is missing or damaged, or has images of another size.
    """
    found = datasets.load(options.dataset, options.data_dir)
    name = options.dataset.removeprefix("synthetic-")
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in STATISTICS[name])
    dtype = getattr(torch, options.dtype)
    train_device = torch.device("cpu") if options.input == "loader" else device
    augment_seed = options.seed if options.augment else None

    def split(
        images: NDArray[np.uint8], labels: NDArray[np.uint8], device: torch.device, augment_seed: int | None = None
    ) -> Split:
        return Split(
            torch.from_numpy(to_rgb(images)).to(device),
            torch.from_numpy(labels).long().to(device),
            mean=mean.to(device),
            std=std.to(device),
            dtype=dtype,
            augment_seed=augment_seed,
        )

    train_set = split(found.train_images, found.train_labels, device=train_device, augment_seed=augment_seed)
    return train_set, split(found.test_images, found.test_labels, device=device)
