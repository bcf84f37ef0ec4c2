"""The data: all images in memory; crop and flip of a whole batch in numpy, the rest by MindSpore's compiled code."""

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
from samestep import datasets
from samestep.phases import Phases
from samestep.sharding import GlobalBatches, sample_bits

# Of CIFAR-10's training pixels, scaled to [0, 1]: red, green, blue.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
PADDING = 4  # pixels on each side, of which a random crop takes its choice

Batch = tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, 32, 32, 3] and labels int32 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int32]

    def training(self, batches: GlobalBatches, steps: range, image_size: int) -> ds.Dataset:
        """This rank's shard of each of ``steps``: images float32 [rows, 3, s, s], labels int32 [rows], weights [rows].

        Every rank has ceil(global batch / ranks) rows at every step, because MindSpore compiles anew for another
        shape and refuses an empty one. Rows that the rank's shard does not fill repeat samples of the batch, with
        weight 0. The other weights make the mean of weight * loss, averaged over ranks, the mean over the samples.
        """
        rows = rows_per_rank(batches)

        def make(step: int) -> Batch:
            own = batches.indices(step)
            repeated = own if len(own) else replace(batches, rank=0, world_size=1).indices(step)
            indices = np.concatenate([own, np.resize(repeated, rows - len(own))])
            weights = np.zeros(rows, np.float32)
            weights[: len(own)] = rows * batches.world_size / batches.size(step)
            images = augment(self.images[indices], indices, batches.seed, batches.epoch(step))
            return images, self.labels[indices], weights

        return pipeline(Source(make, steps, rows), image_size)

    def evaluation(self, first: int, last: int, rows: int, image_size: int) -> ds.Dataset:
        """The samples from ``first`` to before ``last`` as they are, ``rows`` at a time; weight 1, or 0 if repeated."""

        def make(begin: int) -> Batch:
            indices = np.arange(begin, begin + rows)
            weights = (indices < last).astype(np.float32)
            indices = np.minimum(indices, last - 1)
            return self.images[indices], self.labels[indices], weights

        return pipeline(Source(make, range(first, last, rows), rows), image_size)


@dataclass(frozen=True)
class Source:
    """The samples of batches of ``rows`` that ``make`` gives for each of ``batches``, one by one.

    MindSpore asks for the size of what it is to sink before the first step. Where it is not told, it runs through all
    of the data to count it.
    """

    make: Callable[[int], Batch]
    batches: range
    rows: int

    def __len__(self) -> int:
        return len(self.batches) * self.rows

    def __iter__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        for batch in self.batches:
            images, labels, weights = self.make(batch)
            # Arrays of no dimension, not numpy's scalars: those MindSpore cannot take with numpy 2.
            yield from zip(images, map(np.asarray, labels), map(np.asarray, weights))


def rows_per_rank(batches: GlobalBatches) -> int:
    """Rows of each rank at every step."""
    return -(-batches.global_batch_size // batches.world_size)


def augment(images: NDArray[np.uint8], indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.uint8]:
    """Crop at random from the padded images [m, 32, 32, 3], and flip half of them; samples ``indices`` of an epoch.

    A function of (seed, epoch, index) alone, whatever rank or batch an image is in: a resumed run sees the same.
    """
    z = sample_bits(seed, epoch, indices)
    choices = np.uint64(2 * PADDING + 1)
    top, left = (z % choices).astype(np.int64), ((z >> np.uint64(20)) % choices).astype(np.int64)
    flipped = (z >> np.uint64(40)) % np.uint64(2) == 1

    side = images.shape[1]
    padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    along = np.arange(side)
    rows = top[:, None] + along
    columns = left[:, None] + np.where(flipped[:, None], along[::-1], along)
    cropped: NDArray[np.uint8] = padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cropped


def pipeline(source: Source, image_size: int) -> ds.Dataset:
    """MindSpore's compiled transforms over the images of ``source``, in its batches."""
    transforms = [vision.Resize((image_size, image_size))] if image_size != 32 else []
    transforms += [vision.Rescale(1 / 255, 0.0), vision.Normalize(MEAN, STD), vision.HWC2CHW()]
    dataset = ds.GeneratorDataset(source, ["image", "label", "weight"], num_parallel_workers=1, shuffle=False)
    dataset = dataset.map(transforms, "image", num_parallel_workers=1).batch(source.rows, num_parallel_workers=1)
    return dataset


def feed(step: nn.Cell, shards: ds.Dataset, sinks: bool, sink_size: int, phases: Phases) -> Iterator[Tensor]:
    """Loops of ``sink_size`` updates with the next of ``shards``; yields what the last of each returned.

    With ``sinks``, MindSpore has the shards wait on the device, which CPU does not know. Nothing is asked of them
    before the first loop.
    """
    if sinks:
        loop = ms.data_sink(step, shards, sink_size)
        try:
            while True:
                yield loop()
        finally:  # MindSpore would go on from the first shard for as long as the device takes them
            shards.__transfer_dataset__.stop_send()
            shards.__transfer_dataset__.release()
    batches = shards.create_tuple_iterator(num_epochs=1)
    while True:
        for _ in range(sink_size):
            phases.begin()
            batch = next(batches)
            phases.end("input")
            loss = step(*batch)  # ranks talk
            phases.end("waiting")  # and all else that a compiled graph does: what of it nobody tells
        yield loss


def load(name: str, data_dir: Path) -> tuple[Split, Split]:
    """The training and the test set. Raises UserError for a missing or damaged file."""
    found = datasets.load(name, data_dir)
    return (
        Split(found.train_images, found.train_labels.astype(np.int32)),
        Split(found.test_images, found.test_labels.astype(np.int32)),
    )
