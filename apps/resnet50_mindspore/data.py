"""Make batches of images. NumPy crops and flips images, and MindSpore's compiled code normalizes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import vision
from numpy.typing import NDArray
from samestep.data import datasets
from samestep.run import Run
from samestep.sharding import GlobalBatches, sample_bits
from samestep.step_timer import COMMUNICATION, INPUT

# Mean and standard deviation of CIFAR-10's training pixels, scaled to [0, 1]: red, green, blue. The deviations are
# means of the deviations within single images, as in most programs.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
PADDING = 4  # width of the zero border on each side of an image before cropping, in pixels

Batch = tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class Split:
    """A dataset of square images uint8 [n, height, height, 3] and labels int32 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int32]

    def training(self, batches: GlobalBatches, steps: range, image_size: int) -> ds.Dataset:
        """Return this rank's shards of the global batches of ``steps``.

        Every shard has ceil(global batch / world size) rows, because MindSpore recompiles for another shape and does
        not support empty batches. Rows beyond the rank's samples repeat samples with weight 0. The weights of the
        other rows make the mean of weight * loss, averaged over ranks, equal to the mean loss over the samples.

        Args:
            batches: this rank's shards of the global batches.
            steps: numbers of the steps.
            image_size: side of an image, in pixels.

        Returns:
            Per step: images float32 [rows, 3, image_size, image_size], labels int32 [rows], weights float32 [rows].
        """
        rows = rows_per_rank(batches)

        def make(step: int) -> Batch:
            own = batches.indices(step)
            repeated = own
            if not len(own):
                repeated = replace(batches, rank=0, world_size=1).indices(step)
            fill = np.resize(repeated, rows - len(own))
            indices = np.concatenate([own, fill])
            weights = np.zeros(rows, np.float32)
            weights[: len(own)] = rows * batches.world_size / batches.size(step)
            images = augment(self.images[indices], indices, batches.seed, batches.epoch(step))
            return images, self.labels[indices], weights

        return self._pipeline(Source(make, steps, rows), image_size)

    def evaluation(self, first: int, last: int, rows: int, image_size: int) -> ds.Dataset:
        """Return the samples [first, last) without augmentation, in batches of ``rows``.

        The weight of a sample is 1. Samples that pad the last batch have weight 0.

        Args:
            first: number of the first sample.
            last: number after the last sample.
            rows: number of rows of a batch.
            image_size: side of an image, in pixels.
        """

        def make(begin: int) -> Batch:
            indices = np.arange(begin, begin + rows)
            weights = (indices < last).astype(np.float32)
            indices = np.minimum(indices, last - 1)
            return self.images[indices], self.labels[indices], weights

        return self._pipeline(Source(make, range(first, last, rows), rows), image_size)

    def _pipeline(self, source: Source, image_size: int) -> ds.Dataset:
        """Return the batches of ``source`` with images that MindSpore's compiled transforms resize and normalize."""
        transforms = [vision.Rescale(1 / 255, 0.0), vision.Normalize(MEAN, STD), vision.HWC2CHW()]
        if self.images.shape[1:3] != (image_size, image_size):
            transforms.insert(0, vision.Resize((image_size, image_size)))
        dataset = ds.GeneratorDataset(source, ["image", "label", "weight"], num_parallel_workers=1, shuffle=False)
        dataset = dataset.map(transforms, "image", num_parallel_workers=1)
        return dataset.batch(source.rows, num_parallel_workers=1)


@dataclass(frozen=True)
class Source:
    """An iterable of samples, with a length.

    MindSpore needs the length for data sinking. It would otherwise read the full dataset to count the samples.

    Attributes:
        make: function that returns the batch for an item of ``batches``.
        batches: for each batch, its step (training) or the number of its first sample (evaluation).
        rows: number of samples per batch.
    """

    make: Callable[[int], Batch]
    batches: range
    rows: int

    def __len__(self) -> int:
        return len(self.batches) * self.rows

    def __iter__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        for batch in self.batches:
            images, labels, weights = self.make(batch)
            # MindSpore does not support NumPy 2's scalars, so labels and weights are 0-dimensional arrays.
            yield from zip(images, map(np.asarray, labels), map(np.asarray, weights))


def rows_per_rank(batches: GlobalBatches) -> int:
    """Return the number of rows of each rank's batch, which is the same in every step."""
    return -(-batches.global_batch_size // batches.world_size)


def augment(images: NDArray[np.uint8], indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.uint8]:
    """Pad images with zeros, crop each at a random position to the original size, and flip each with probability 1/2.

    An image's crop and flip depend only on (seed, epoch, index). They are the same on any rank and after a resume.

    Args:
        images: images uint8 [m, height, height, 3].
        indices: indices of the images in the training set, int64 [m].
        seed: seed of the run.
        epoch: number of the epoch, from 0.

    Returns:
        Images uint8 [m, height, height, 3].
    """
    z = sample_bits(seed, epoch, indices)
    choices = np.uint64(2 * PADDING + 1)
    top = (z % choices).astype(np.int64)
    left = ((z >> np.uint64(20)) % choices).astype(np.int64)
    flipped = (z >> np.uint64(40)) % np.uint64(2) == 1

    side = np.arange(images.shape[1])
    padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    rows = top[:, None] + side
    columns = left[:, None] + np.where(flipped[:, None], side[::-1], side)
    numbers = np.arange(len(images))
    cropped: NDArray[np.uint8] = padded[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cropped


def train_loops(run: Run, train_step: nn.Cell, shards: ds.Dataset, sinks: bool) -> Iterator[Tensor]:
    """Run loops of --sink-size updates over ``shards``, and yield the last loss of each loop.

    If ``sinks`` is true, MindSpore sends the shards to the device in advance. The CPU does not support data sinking.
    MindSpore reads the first batch when the first loop starts.

    Args:
        run: run with the options, the monitor and the timer.
        train_step: cell that computes one update.
        shards: this rank's batches.
        sinks: whether to use data sinking.
    """
    if sinks:
        loop = ms.data_sink(train_step, shards, run.options.sink_size)
        try:
            while True:
                with run.monitor.collective("train step"):
                    loss = loop()  # collective
                yield loss
        finally:  # otherwise, MindSpore would continue to send shards, again from the first shard
            shards.__transfer_dataset__.stop_send()
            shards.__transfer_dataset__.release()
    batches = shards.create_tuple_iterator(num_epochs=1)
    while True:
        for _ in range(run.options.sink_size):
            with run.timer.phase(INPUT):
                batch = next(batches)
            with run.monitor.collective("train step"):
                loss = train_step(*batch)  # collective
            run.timer.mark(COMMUNICATION)  # includes all work of the compiled graph, whose parts cannot be timed
        yield loss


def load(name: str, data_dir: Path) -> tuple[Split, Split]:
    """Return the training set and the test set.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    found = datasets.load(name, data_dir)
    train_set = Split(found.train_images, found.train_labels.astype(np.int32))
    test_set = Split(found.test_images, found.test_labels.astype(np.int32))
    return train_set, test_set
