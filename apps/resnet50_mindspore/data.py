"""Serve batches: crop and flip whole batches of images in numpy, do the rest in MindSpore's compiled code."""

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

# Of CIFAR-10's training pixels, scaled to [0, 1]: red, green, blue.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
PADDING = 4  # pixels on each side, for the random crop

Batch = tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, 32, 32, 3] and labels int32 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int32]

    def training(self, batches: GlobalBatches, steps: range, image_size: int) -> ds.Dataset:
        """Return this rank's shard of the global batch of each of ``steps``.

        Every rank has ceil(global batch / world size) rows at every step, because MindSpore compiles again for another
        shape and refuses an empty one. Rows that the rank's shard does not fill repeat samples of the batch, with
        weight 0. The other weights make the mean of weight * loss, averaged over ranks, the mean over the samples.

        Returns:
            Per step images float32 [rows, 3, image_size, image_size], labels int32 [rows], weights float32 [rows].
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

        return _pipeline(Source(make, steps, rows), image_size)

    def evaluation(self, first: int, last: int, rows: int, image_size: int) -> ds.Dataset:
        """Return the samples from ``first`` to before ``last``, not augmented, in batches of ``rows``.

        The weight of a sample is 1. A sample that only fills up the last batch has weight 0.
        """

        def make(begin: int) -> Batch:
            indices = np.arange(begin, begin + rows)
            weights = (indices < last).astype(np.float32)
            indices = np.minimum(indices, last - 1)
            return self.images[indices], self.labels[indices], weights

        return _pipeline(Source(make, range(first, last, rows), rows), image_size)


@dataclass(frozen=True)
class Source:
    """Iterate over the samples of the batches of ``rows`` that ``make`` returns for each of ``batches``.

    Before the first step, MindSpore asks for the size of a dataset that will sink. It would read all of a dataset
    without a length to count it.
    """

    make: Callable[[int], Batch]
    batches: range
    rows: int

    def __len__(self) -> int:
        return len(self.batches) * self.rows

    def __iter__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        for batch in self.batches:
            images, labels, weights = self.make(batch)
            # Arrays of no dimension, not numpy's scalars: MindSpore cannot take those with numpy 2.
            yield from zip(images, map(np.asarray, labels), map(np.asarray, weights))


def rows_per_rank(batches: GlobalBatches) -> int:
    """Return the rows that each rank has at every step."""
    return -(-batches.global_batch_size // batches.world_size)


def augment(images: NDArray[np.uint8], indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.uint8]:
    """Crop each image at random from its padded self, and flip half of the images.

    The result depends on (seed, epoch, index) alone, not on the rank or batch: a resumed run sees the same images.

    Args:
        images: uint8 [m, 32, 32, 3].
        indices: their indices in the training set, int64 [m].
        seed: the run's seed.
        epoch: from 0.

    Returns:
        uint8 [m, 32, 32, 3].
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


def _pipeline(source: Source, image_size: int) -> ds.Dataset:
    """Return the batches of ``source`` after MindSpore's compiled transforms of the images."""
    transforms = [vision.Rescale(1 / 255, 0.0), vision.Normalize(MEAN, STD), vision.HWC2CHW()]
    if image_size != 32:
        transforms.insert(0, vision.Resize((image_size, image_size)))
    dataset = ds.GeneratorDataset(source, ["image", "label", "weight"], num_parallel_workers=1, shuffle=False)
    dataset = dataset.map(transforms, "image", num_parallel_workers=1)
    return dataset.batch(source.rows, num_parallel_workers=1)


def train_loops(run: Run, train_step: nn.Cell, shards: ds.Dataset, sinks: bool) -> Iterator[Tensor]:
    """Run loops of --sink-size updates with the next of ``shards``; yield the last loss of each loop.

    With ``sinks``, MindSpore keeps the shards ready on the device, which the CPU does not support. No batch is read
    before the first loop starts.
    """
    if sinks:
        loop = ms.data_sink(train_step, shards, run.options.sink_size)
        try:
            while True:
                with run.monitor.collective("train step"):
                    loss = loop()  # collective
                yield loss
        finally:  # otherwise MindSpore sends shards for as long as the device takes them, from the first one again
            shards.__transfer_dataset__.stop_send()
            shards.__transfer_dataset__.release()
    batches = shards.create_tuple_iterator(num_epochs=1)
    while True:
        for _ in range(run.options.sink_size):
            with run.timer.phase(INPUT):
                batch = next(batches)
            with run.monitor.collective("train step"):
                loss = train_step(*batch)  # collective
            run.timer.mark(COMMUNICATION)  # with all else that the compiled graph does: nothing measures it
        yield loss


def load(name: str, data_dir: Path) -> tuple[Split, Split]:
    """Return the training set and the test set. Raises ConfigError if a file is missing or damaged."""
    found = datasets.load(name, data_dir)
    train_set = Split(found.train_images, found.train_labels.astype(np.int32))
    test_set = Split(found.test_images, found.test_labels.astype(np.int32))
    return train_set, test_set
