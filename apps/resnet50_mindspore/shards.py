"""Count what MindSpore's own sharding gives the ranks in an epoch, and what ours does; prints a table in Markdown.

bash scripts/run_resnet50_mindspore.sh 1 --depth 18 --max-steps 0         # makes .venvs/resnet50_mindspore
.venvs/resnet50_mindspore/bin/python apps/resnet50_mindspore/shards.py    # --help

MindSpore's is `ds.Cifar10Dataset(folder, num_shards=N, shard_id=r)` and `.batch(rows, drop_remainder=...)` for each
rank r, with rows = ceil(global batch / N), as it has no shards of different sizes; ours is `GlobalBatches`. Both read
the same files. MindSpore's reader takes files of exactly 10,000 images, as CIFAR-10's are and made-up ones are not,
and to be counted each image must be told from all others: so files of that size are written for the purpose, in which
an image's first pixel holds its number.

Of the columns, "promised" is `get_dataset_size()`, or `GlobalBatches.steps_per_epoch`; the last two say how many global
batches hold the same samples as at one rank, without shuffling and with it, from the same seed.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mindspore.dataset as ds
import numpy as np
from numpy.typing import NDArray
from samestep import datasets
from samestep.options import whole
from samestep.sharding import GlobalBatches

SEED = 1


class Epoch(NamedTuple):
    """What all ranks together take in one epoch: ``batches`` has the samples of each step, in ascending order.

    ``promised`` is the number of steps by `get_dataset_size()`, or by `GlobalBatches`.
    """

    batches: list[NDArray[np.int64]]
    promised: int


@dataclass(frozen=True)
class Sharding:
    """A row of the table: one way to shard, at one number of ranks."""

    name: str
    ranks: int
    shuffled: Epoch
    in_order: Epoch | None  # ours always shuffles

    def row(self, alone: Sharding, n: int) -> str:
        """The row in Markdown; ``alone`` is the same way with one rank, ``n`` the number of samples there are."""
        seen = np.bincount(np.concatenate(self.shuffled.batches), minlength=n)
        sizes = [len(batch) for batch in self.shuffled.batches]
        counted = [len(sizes), self.shuffled.promised, sizes[0], sizes[-1]]
        counted += [int((seen == times).sum()) for times in (1, 2, 0)]
        same = [equal(self.in_order, alone.in_order), equal(self.shuffled, alone.shuffled)]
        cells = [str(self.ranks), self.name, *(f"{count:,}" for count in counted), *same]
        return f"| {' | '.join(cells)} |"


HEAD = """
| ranks | | steps | promised | global batch | the last | seen once | twice | never | same, in order | same, shuffled |
|---|---|---|---|---|---|---|---|---|---|---|"""


def equal(one: Epoch | None, other: Epoch | None) -> str:
    """How many global batches hold the same samples."""
    if one is None or other is None:
        return "-"
    return f"{sum(map(np.array_equal, one.batches, other.batches)):,}"


def write_numbered(folder: Path) -> None:
    """CIFAR-10's binary files, each image with its number among all 60,000 in its first pixel, and labels 0 to 9."""
    folder.mkdir()
    first = 0
    for name, count in zip(datasets.CIFAR_FILES, datasets.CIFAR_RECORDS["cifar10"]):
        rows = np.zeros((count, 1 + 3 * datasets.CIFAR_SIDE**2), np.uint8)
        samples = np.arange(first, first + count)
        rows[:, 0] = samples % 10
        for plane in range(3):  # eight bits in red, in green and in blue
            rows[:, 1 + plane * datasets.CIFAR_SIDE**2] = samples >> 8 * plane & 0xFF
        rows.tofile(folder / name)
        first += count


def numbers(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The numbers [m] of images [m, 32, 32, 3]."""
    red, green, blue = images[:, 0, 0].astype(np.int64).T
    found: NDArray[np.int64] = red | green << 8 | blue << 16
    return found


def mindspores(folder: Path, ranks: int, rows: int, shuffle: bool, drop: bool) -> Epoch:
    """One epoch of ``rows`` samples a rank and step, read from ``folder`` once for each rank."""
    shards, sizes = [], set()
    for rank in range(ranks):
        ds.config.set_seed(SEED)
        dataset = ds.Cifar10Dataset(str(folder), usage="train", shuffle=shuffle, num_shards=ranks, shard_id=rank)
        dataset = dataset.batch(rows, drop_remainder=drop)
        sizes.add(dataset.get_dataset_size())
        batches = dataset.create_tuple_iterator(num_epochs=1, output_numpy=True)
        shards.append([numbers(images) for images, _ in batches])
    (size,) = sizes
    return Epoch([np.sort(np.concatenate(step)) for step in zip(*shards, strict=True)], size)


def ours(samples: NDArray[np.int64], ranks: int, global_batch_size: int) -> Epoch:
    """One epoch of the numbers [n] of all images."""
    shards = [GlobalBatches(len(samples), global_batch_size, SEED, rank, ranks) for rank in range(ranks)]
    steps = range(shards[0].steps_per_epoch)
    taken = [np.concatenate([samples[shard.indices(step)] for shard in shards]) for step in steps]
    return Epoch([np.sort(batch) for batch in taken], len(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=whole(2), nargs="+", default=[2, 3, 8], metavar="N", help="beside 1")
    parser.add_argument("--global-batch-size", type=whole(1), default=128, metavar="B", help="(default: %(default)s)")
    options = parser.parse_args()
    size, total = options.global_batch_size, sum(datasets.CIFAR_RECORDS["cifar10"][:-1])
    if size > total:
        parser.error(f"--global-batch-size {size}: choose at most {total}, all of the training set")

    with tempfile.TemporaryDirectory() as data_dir:
        folder = Path(data_dir, "cifar10")
        write_numbered(folder)
        samples = numbers(datasets.load("cifar10", Path(data_dir)).train_images)

        print(f"{len(samples):,} samples, a global batch of {size:,}\n{HEAD}")
        alone: dict[str, Sharding] = {}
        for ranks in (1, *options.ranks):
            rows = -(-size // ranks)
            for drop in (True, False):
                shuffled, in_order = (mindspores(folder, ranks, rows, shuffle, drop) for shuffle in (True, False))
                made = Sharding(f"MindSpore, drop_remainder={drop}", ranks, shuffled, in_order)
                print(made.row(alone.setdefault(made.name, made), len(samples)), flush=True)
            made = Sharding("GlobalBatches", ranks, ours(samples, ranks, size), None)
            print(made.row(alone.setdefault(made.name, made), len(samples)), flush=True)


if __name__ == "__main__":
    main()
