"""Count the samples of one epoch in MindSpore's sharding and in `GlobalBatches`, and print a Markdown table.

bash scripts/run_resnet50_mindspore.sh 1 --depth 18 --max-steps 0         # makes .venvs/resnet50_mindspore
.venvs/resnet50_mindspore/bin/python apps/resnet50_mindspore/shards.py    # --help

MindSpore's sharding is `ds.Cifar10Dataset(folder, num_shards=N, shard_id=r)` and `.batch(rows, drop_remainder=...)` for
each rank r. These shards have equal sizes, so rows = ceil(global batch / N). MindSpore and `GlobalBatches` read the
same files, which this program writes. The first pixel of an image encodes the image's number. MindSpore reads only
files of exactly 10,000 images.

The column "promised" is `get_dataset_size()`, or `GlobalBatches.steps_per_epoch`. The last two columns count global
batches with the same samples as at one rank, in order and shuffled, from the same seed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mindspore.dataset as ds
import numpy as np
from numpy.typing import NDArray
from samestep.data import datasets
from samestep.data.files import CIFAR_FILES, CIFAR_RECORDS, CIFAR_SIDE
from samestep.options import bounded_int
from samestep.sharding import GlobalBatches

SEED = 1
HEAD = """
| ranks | | steps | promised | global batch | the last | seen once | twice | never | same, in order | same, shuffled |
|---|---|---|---|---|---|---|---|---|---|---|"""


class Epoch(NamedTuple):
    """The samples of all ranks in one epoch."""

    batches: list[NDArray[np.int64]]  # numbers of the samples of each step, in ascending order
    promised: int  # number of steps from `get_dataset_size()`, or of `GlobalBatches`


def table_row(name: str, ranks: int, epochs: Sequence[Epoch], baseline: Sequence[Epoch], n: int) -> str:
    """Return a Markdown row for one way to shard at one world size.

    Args:
        name: name of the way to shard.
        ranks: world size.
        epochs: an epoch in order and a shuffled epoch, or only a shuffled epoch.
        baseline: the same epochs at one rank.
        n: number of samples in the dataset.
    """
    shuffled = epochs[-1]
    seen = np.bincount(np.concatenate(shuffled.batches), minlength=n)
    sizes = [len(batch) for batch in shuffled.batches]
    times = [int((seen == count).sum()) for count in (1, 2, 0)]
    counts = [len(sizes), shuffled.promised, sizes[0], sizes[-1], *times]
    same = ["-"]  # the cell if the epoch in order is missing
    for one, other in zip(epochs, baseline):
        equal = sum(map(np.array_equal, one.batches, other.batches))
        same.append(f"{equal:,}")
    cells = [str(ranks), name, *(f"{count:,}" for count in counts), *same[-2:]]
    return f"| {' | '.join(cells)} |"


def write_numbered(folder: Path) -> None:
    """Write CIFAR-10's binary files with labels 0 to 9. Each image's first pixel encodes its number, 0 to 59,999."""
    folder.mkdir()
    first = 0
    for name, count in zip(CIFAR_FILES, CIFAR_RECORDS["cifar10"]):
        rows = np.zeros((count, 1 + 3 * CIFAR_SIDE**2), np.uint8)
        samples = np.arange(first, first + count)
        rows[:, 0] = samples % 10
        four_bytes = samples.astype("<u4").view(np.uint8).reshape(-1, 4)
        rows[:, 1 :: CIFAR_SIDE**2] = four_bytes[:, :3]  # red, green, blue
        rows.tofile(folder / name)
        first += count


def numbers(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the numbers [m] that the first pixels of images [m, 32, 32, 3] encode."""
    return np.asarray(images[:, 0, 0] @ np.array([1, 1 << 8, 1 << 16]), np.int64)


def mindspore_epoch(folder: Path, ranks: int, rows: int, shuffle: bool, drop: bool) -> Epoch:
    """Return one epoch of MindSpore's sharding, with ``rows`` samples per rank and step.

    Args:
        folder: folder of the files.
        ranks: world size.
        rows: number of samples per rank and step.
        shuffle: whether MindSpore shuffles.
        drop: whether MindSpore omits an incomplete last batch.
    """
    shards = []
    sizes = set()
    for rank in range(ranks):
        ds.config.set_seed(SEED)
        dataset = ds.Cifar10Dataset(str(folder), usage="train", shuffle=shuffle, num_shards=ranks, shard_id=rank)
        dataset = dataset.batch(rows, drop_remainder=drop)
        sizes.add(dataset.get_dataset_size())
        batches = dataset.create_tuple_iterator(num_epochs=1, output_numpy=True)
        shards.append([numbers(images) for images, _ in batches])
    (size,) = sizes
    steps = [np.sort(np.concatenate(step)) for step in zip(*shards, strict=True)]
    return Epoch(steps, size)


def our_epoch(samples: NDArray[np.int64], ranks: int, global_batch_size: int) -> Epoch:
    """Return one epoch of `GlobalBatches` over ``samples``, the numbers [n] of all images."""
    shards = [GlobalBatches(len(samples), global_batch_size, SEED, rank, ranks) for rank in range(ranks)]
    taken = []
    for step in range(shards[0].steps_per_epoch):
        parts = [samples[shard.indices(step)] for shard in shards]
        taken.append(np.sort(np.concatenate(parts)))
    return Epoch(taken, len(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=bounded_int(2), nargs="+", default=[2, 3, 8], metavar="N", help="world sizes beside 1")
    add("--global-batch-size", type=bounded_int(1), default=128, metavar="B", help="(default: %(default)s)")
    files = len(CIFAR_FILES) - 1
    add("--files", type=bounded_int(1, files), default=files, metavar="F", help="files of 10,000 images (default: all)")
    options = parser.parse_args()
    size = options.global_batch_size
    total = sum(CIFAR_RECORDS["cifar10"][: options.files])
    if size > total:
        parser.error(f"--global-batch-size {size}: choose at most {total}, all of the training set")

    with tempfile.TemporaryDirectory() as data_dir:
        folder = Path(data_dir, "cifar10")
        write_numbered(folder)
        samples = numbers(datasets.load("cifar10", Path(data_dir)).train_images)[:total]
        for name in CIFAR_FILES[options.files : -1]:
            (folder / name).unlink()

        print(f"{len(samples):,} samples, a global batch of {size:,}\n{HEAD}")
        baselines: dict[str, list[Epoch]] = {}
        for ranks in (1, *options.ranks):
            rows = -(-size // ranks)
            epochs = {}
            for drop in (True, False):
                in_order = mindspore_epoch(folder, ranks, rows, shuffle=False, drop=drop)
                shuffled = mindspore_epoch(folder, ranks, rows, shuffle=True, drop=drop)
                epochs[f"MindSpore, drop_remainder={drop}"] = [in_order, shuffled]
            epochs["GlobalBatches"] = [our_epoch(samples, ranks, size)]
            for name, found in epochs.items():
                baseline = baselines.setdefault(name, found)
                print(table_row(name, ranks, found, baseline, n=len(samples)), flush=True)


if __name__ == "__main__":
    main()
