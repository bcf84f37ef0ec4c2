"""Compute which samples a rank processes at a step. Each epoch has one global order, divided by step and then by rank.

The order of an epoch is a pseudo-random permutation of [0, n) that is never stored. `permute` computes any part of the
order from (n, seed, epoch). With a global batch size of B, step k of an epoch uses the positions [k * B, (k + 1) * B)
of the epoch's order. Each rank gets one contiguous shard of these positions. Therefore:

* The global batches are the same at any world size: the ranks' shards, in rank order, form the global batch.
* A resume computes its first step as fast as any other step. A resume at another world size neither repeats nor omits
  samples.
* The complete state is (seed, epoch, step). Memory holds the current batch's indices and up to PREFETCH_SAMPLES more.

Checkpoints rely on the order: for given (n, seed, epoch) it must never change, on any platform or NumPy version.
Therefore all arithmetic is on integers modulo 2**64, without `numpy.random`.

The permutation is a Feistel network (Luby & Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", SIAM J. Comput. 17(2), 1988). Its generalized form works on pairs (left, right) in Z_a x Z_b, with a * b
equal to n or just above n. Cycle walking moves the few results in [n, a * b) into [0, n). The generalized form and
cycle walking are from Black & Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. Because a * b - n is below
sqrt(n) + 1, few values need cycle walking. The order is a statistical shuffle, not encryption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# A statistical test must read almost the entire table of a 6-round Feistel network to recognize it, and 8 rounds add a
# margin. Tiny datasets need more rounds. At n = 4 a round chooses one of 4 functions, so 8 rounds produce the 24
# permutations with visibly unequal frequencies.
ROUNDS = 8
ROUNDS_TINY = 32
TINY = 1024  # datasets with fewer samples use ROUNDS_TINY

RANDOM_NUMBERS = "random_numbers"  # field of a run's metadata: method of dropout's random numbers, from samestep 0.3
PREFETCH_SAMPLES = 2048  # indices that a rank computes ahead; computing 2048 is hardly slower than computing 128
_BLOCK = 8192  # positions per pass, so that the work arrays (64 KiB each) fit into a core's cache
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)  # SplitMix64's first multiplier
_SHIFT = np.uint64(32)


def splitmix64(z: Any) -> Any:
    """Apply SplitMix64's output function to ``z``, an int or a uint64 array: a bijection on [0, 2**64).

    The function is from Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. The
    constants are from the reference implementation, https://prng.di.unimi.it/splitmix64.c.
    """
    z = z ^ (z >> 30)
    z = z * 0xBF58476D1CE4E5B9 & _MASK
    z = z ^ (z >> 27)
    z = z * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, rounds: int) -> tuple[tuple[np.uint64, np.uint64], ...]:
    """Return (odd multiplier, offset) for each round, from a SplitMix64 stream.

    The stream starts at the state mix(mix(seed + gamma) + epoch). This state differs between the epochs of one seed,
    and between the seeds at one epoch.
    """
    if not 0 <= seed <= _MASK:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    if not 0 <= epoch <= _MASK:
        raise ValueError(f"epoch must be in [0, 2**64), got {epoch}")
    state = splitmix64((seed + _GAMMA) & _MASK)
    state = splitmix64((state + epoch) & _MASK)
    keys = []
    for i in range(1, 2 * rounds, 2):
        multiplier = splitmix64((state + i * _GAMMA) & _MASK)
        offset = splitmix64((state + (i + 1) * _GAMMA) & _MASK)
        keys.append((np.uint64(multiplier | 1), np.uint64(offset)))
    return tuple(keys)


def _feistel(values: NDArray[np.uint64], a: int, b: int, keys: tuple[Any, ...]) -> NDArray[np.uint64]:
    """Apply a keyed bijection on [0, a * b) to ``values``, uint64 [m]. a and b are at most 2**32.

    A round hashes one half and adds the hash to the other half, modulo that half's size. The hash multiplies, folds,
    multiplies again, keeps the high 32 bits and scales them to the size (Lemire, "Fast random integer generation in an
    interval", 2019).
    """
    half, other = np.divmod(values, np.uint64(b))
    size = np.uint64(a)
    other_size = np.uint64(b)
    for multiplier, offset in keys:
        mixed = other * multiplier + offset
        mixed = mixed ^ (mixed >> _SHIFT)
        mixed = (mixed * _MULTIPLIER) >> _SHIFT
        moved = half + ((mixed * size) >> _SHIFT)
        half = other
        # If `moved` < `size`, then `moved - size` wraps to a huge value. So the minimum equals `moved` modulo `size`.
        other = np.minimum(moved, moved - size)
        size, other_size = other_size, size
    return half * np.uint64(b) + other  # after an even number of rounds, the halves have their original sizes


def permute(positions: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map positions in an epoch's order to sample indices, without storing the order.

    Args:
        positions: integers in [0, n), of any shape, in any order, repeats allowed.
        n: number of samples in the dataset, 1 <= n < 2**63.
        seed: integer in [0, 2**64).
        epoch: integer in [0, 2**64). Different pairs of seed and epoch give unrelated orders.

    Returns:
        int64 array of the shape of ``positions``, with values in [0, n). The result for arange(n) is a permutation.

    Raises:
        ValueError: n, seed, epoch or a position is out of range.
        TypeError: positions are not integers.
    """
    if not 1 <= n < 2**63:
        raise ValueError(f"n must be in [1, 2**63), got {n}")
    rounds = ROUNDS if n >= TINY else ROUNDS_TINY
    keys = _keys(seed, epoch, rounds)
    array = np.asarray(positions)
    flat = array.astype(np.int64, casting="same_kind").view(np.uint64).reshape(-1)  # a negative value becomes huge
    if flat.size and int(flat.max()) >= n:
        raise ValueError(f"positions must be in [0, {n})")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        block[...] = _feistel(block, a, b, keys)
    # Cycle walking: apply the bijection again to each value outside [0, n) until its result is inside. The loop ends,
    # because the cycle of such a value contains the position that it started from, which is inside.
    outside = np.flatnonzero(flat >= np.uint64(n))
    while outside.size:
        flat[outside] = _feistel(flat[outside], a, b, keys)
        outside = outside[flat[outside] >= np.uint64(n)]
    return flat.view(np.int64).reshape(array.shape)


def shard(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return [start, stop) of a rank's contiguous shard of ``length`` items.

    The sizes of shards differ by at most one: the first length % world_size ranks get one more item, as in
    `numpy.array_split`. A shard may be empty.

    Args:
        length: number of items.
        rank: index of the shard, in [0, world_size).
        world_size: number of shards.

    Raises:
        ValueError: length < 0, world_size < 1, or rank outside [0, world_size).
    """
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


def eval_batches(length: int, batch_size: int, parts: int) -> list[NDArray[np.int64]]:
    """Divide ``length`` examples into batches for evaluation.

    Args:
        length: number of examples.
        batch_size: maximum number of examples per batch.
        parts: minimum number of batches.

    Returns:
        The examples' indices, int64 [m] for each batch. The sizes differ by at most one, and may be 0.
    """
    return np.array_split(np.arange(length), max(parts, -(-length // batch_size)))


class BatchSlice(NamedTuple):
    """The rows of a global batch that a rank computes.

    Attributes:
        first: index of the rank's first row.
        global_size: rows of the global batch, over all ranks.
    """

    first: int
    global_size: int


@dataclass(frozen=True)
class GlobalBatches:
    """Compute one rank's shard of every global batch.

    The argument ``step`` is the number of updates done before the step, counted from 0 through all epochs. The last
    batch of an epoch holds the remaining samples and may be smaller. With ``drop_last``, an epoch omits this batch if
    it is smaller.

    Args:
        n: number of samples in the dataset, in [1, 2**63).
        global_batch_size: samples per step, over all ranks; at least 1.
        seed: integer in [0, 2**64). The order of an epoch depends on the seed and the epoch.
        rank: index of the shard that `indices` returns.
        world_size: number of shards per batch.
        virtual_ranks: None, or the number of sub-shards in each of the ``accumulate`` parts of a global batch. Each
            sub-shard is a micro-batch of one rank, and has the same samples at any world size.
        accumulate: micro-batches per global batch, at least 1. Without ``virtual_ranks``, each rank computes a shard
            of each micro-batch.
        drop_last: whether to omit an epoch's last batch if it is smaller.

    Raises:
        ValueError: an argument is out of range, or no batch remains. A method raises ValueError if its ``step`` is
            negative.
    """

    n: int
    global_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    virtual_ranks: int | None = None
    accumulate: int = 1
    drop_last: bool = field(default=False, kw_only=True)
    # The indices that `_cached_indices` has computed, by step.
    _index_cache: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = self.global_batch_size
        for name, value in (("global_batch_size", size), ("accumulate", self.accumulate)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.drop_last and size > self.n:
            raise ValueError(f"global_batch_size must be at most {self.n} to leave a batch, got {size}")
        shard(0, self.rank, self.world_size)  # raises ValueError for an invalid rank or world_size
        permute(np.empty(0, np.int64), self.n, self.seed, 0)  # raises ValueError for an invalid n or seed

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates in an epoch: n / global_batch_size, rounded up, or down with ``drop_last``."""
        if self.drop_last:
            return self.n // self.global_batch_size
        return -(-self.n // self.global_batch_size)

    def _locate(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, start, stop): the step's epoch and its global batch's positions [start, stop) in the order."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.global_batch_size
        return epoch, start, min(start + self.global_batch_size, self.n)

    def epoch(self, step: int) -> int:
        """Return the epoch of this step, counted from 0."""
        return self._locate(step)[0]

    def size(self, step: int) -> int:
        """Return the number of samples in this step's global batch, over all ranks; at least 1."""
        _, start, stop = self._locate(step)
        return stop - start

    def samples_seen(self, step: int) -> int:
        """Return the number of samples in the steps 0 to step - 1, over all ranks."""
        epoch, start, _ = self._locate(step)
        samples_per_epoch = min(self.n, self.steps_per_epoch * self.global_batch_size)
        return epoch * samples_per_epoch + start

    def num_losses(self, step: int) -> int:
        """Return the number of losses that this step's mean loss averages: one for each sample."""
        return self.size(step)

    def num_losses_before(self, step: int) -> int:
        """Return the number of losses of the steps 0 to step - 1, over all ranks."""
        return self.samples_seen(step)

    def num_micro_batches(self, step: int) -> int:
        """Return the number of this step's micro-batches, over all ranks. Each micro-batch has at least one sample."""
        return min(self.accumulate * (self.virtual_ranks or 1), self.size(step))

    def micro_batches(self, step: int) -> list[tuple[int, int]]:
        """Return (k, count) of each micro-batch that this rank computes, for `rows` and `indices`.

        Without ``virtual_ranks``, a rank computes a shard of every micro-batch. With ``virtual_ranks``, each
        micro-batch belongs to one rank.
        """
        count = self.num_micro_batches(step)
        own = range(count)
        if self.virtual_ranks:
            own = range(*shard(count, self.rank, self.world_size))
        return [(k, count) for k in own]

    def rows(self, step: int, micro_batch: tuple[int, int] = (0, 1)) -> BatchSlice:
        """Return the place, in this step's global batch, of the samples that `indices` returns."""
        first, _ = self._shard(step, *micro_batch)
        return BatchSlice(first, self.size(step))

    def local_rows(self, step: int, micro_batch: tuple[int, int] = (0, 1)) -> range:
        """Return the row numbers, in this step's global batch, of the samples that `indices` returns."""
        return range(*self._shard(step, *micro_batch))

    def indices(self, step: int, micro_batch: tuple[int, int] = (0, 1)) -> NDArray[np.int64]:
        """Return the sample indices of this rank's shard of a global batch.

        At consecutive steps, the method computes up to PREFETCH_SAMPLES indices at a time. At any other step, and for a
        micro-batch without ``virtual_ranks``, it computes only the indices that it returns.

        Args:
            step: number of updates done before this step.
            micro_batch: (k, count) for the shard of the k-th of ``count`` micro-batches, from 0; see `micro_batches`.
                A micro-batch has the same samples at any world size.

        Returns:
            int64 [m]. If there are fewer samples than ranks, m is 0 on some ranks.
        """
        if micro_batch == (0, 1):
            return self._cached_indices(step)
        if self.virtual_ranks:
            first, stop = self._shard(step, *micro_batch)
            return self._cached_indices(step)[first:stop]
        return self._compute_indices(range(step, step + 1), *micro_batch)[0]

    def _cached_indices(self, step: int) -> NDArray[np.int64]:
        """Return this rank's indices at ``step``, or with ``virtual_ranks`` the indices of the global batch."""
        cached = self._index_cache.get(step)
        if cached is not None:
            return cached
        is_seek = step - 1 not in self._index_cache
        ranks = 1 if self.virtual_ranks else self.world_size
        shard_size = self.global_batch_size // ranks + 1
        ahead = 1 if is_seek else max(1, PREFETCH_SAMPLES // shard_size)
        left_in_epoch = self.steps_per_epoch - step % self.steps_per_epoch
        steps = range(step, step + min(ahead, left_in_epoch))
        shards = self._compute_indices(steps)
        self._index_cache.clear()
        self._index_cache.update(zip(steps, shards))
        return shards[0]

    def _compute_indices(self, steps: range, k: int = 0, count: int = 1) -> list[NDArray[np.int64]]:
        """Return this rank's indices at each of ``steps``, which belong to one epoch."""
        positions = []
        for step in steps:
            _, start, _ = self._locate(step)
            first, stop = self._shard(step, k, count)
            positions.append(start + np.arange(first, stop, dtype=np.int64))
        order = permute(np.concatenate(positions), self.n, seed=self.seed, epoch=self.epoch(steps.start))
        sizes = [len(each) for each in positions[:-1]]
        return np.split(order, np.cumsum(sizes, dtype=np.int64))

    def _shard(self, step: int, k: int, count: int) -> tuple[int, int]:
        """Return [first, stop): this rank's rows of the global batch, in the k-th of ``count`` micro-batches."""
        first, stop = shard(self.size(step), k, count)
        if self.virtual_ranks:
            return first, stop
        begin, end = shard(stop - first, self.rank, self.world_size)
        return first + begin, first + end


def step_seed(seed: int, step: int) -> int:
    """Compute the seed for one step's random numbers, such as dropout masks. All ranks compute the same seed.

    The result depends only on the run's seed and the step, so checkpoints do not store it. Each rank can draw the
    numbers of the global batch and use the numbers of its own rows. Dropout then drops the same units at any world
    size.

    Args:
        seed: seed of the run, in [0, 2**64).
        step: number of updates done before the step.

    Returns:
        The seed, in [0, 2**64).
    """
    state = splitmix64((seed + _GAMMA) & _MASK)
    return int(splitmix64((state ^ step) & _MASK))


def sample_bits(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample in an epoch. The bits do not depend on the sample's rank or batch.

    Args:
        seed: seed of the run.
        epoch: number of the epoch, from 0.
        indices: int64 [m], the samples' indices.

    Returns:
        uint64 [m].
    """
    counters = indices.astype(np.uint64) + np.uint64(1)
    states = counters * np.uint64(_GAMMA) + np.uint64(step_seed(seed, epoch))
    return np.asarray(splitmix64(states), np.uint64)
