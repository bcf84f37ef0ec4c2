"""Which samples does this rank take at this step? One global order per epoch, cut by step, then by rank.

The order of an epoch is a pseudo-random permutation of [0, n) that is never stored: `permute` computes any part of it
from (n, seed, epoch) alone. Step k takes the positions [k * B, (k + 1) * B) of its epoch's order, B being the global
batch size; each rank takes one contiguous shard of that. What follows from it:

- The global batches are the same at any world size: the ranks' shards, in rank order, are the batch of one rank.
- A resume is a seek, of the cost of any step's, and at another world size sees no sample twice and misses none.
- The whole state is (seed, epoch, step). Memory is that of the batch asked for, and of AHEAD indices.

Checkpoints rely on the order, so it is part of the contract: it must never change for given (n, seed, epoch), on any
platform or NumPy version. Everything is therefore integer arithmetic modulo 2**64, without `numpy.random`.

Method: a Feistel network (Luby & Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
SIAM J. Comput. 17(2), 1988) in its generalised form over pairs (left, right) in Z_a x Z_b, with a * b just above n, and
cycle walking for the few values that land in [n, a * b) (both: Black & Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). Against a power-of-two domain, which may be twice n, next to no value has to walk: a * b - n is
below sqrt(n) + 1. It is a good shuffle, not encryption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Against a random permutation a Feistel network of 6 rounds shows only to one who reads about all of its table; 8
# leave a margin. Halves of a few values need more: at n = 4 a round picks one of 4 functions, and the product of 8 of
# them is still visibly uneven over the 24 permutations.
ROUNDS = 8
ROUNDS_TINY = 32
TINY = 1024  # data sets below this many samples get ROUNDS_TINY

AHEAD = 2048  # samples that a rank may know ahead: computing so many takes hardly longer than computing 128
_BLOCK = 8192  # positions at a time, so that the four work arrays (256 KiB) stay in a core's cache
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment
_MULTIPLIER, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # SplitMix64's multipliers
_SHIFT = np.uint64(32)


def _mix(z: int) -> int:
    """SplitMix64's output function: a bijection on [0, 2**64).

    Source: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of its
    reference implementation, https://prng.di.unimi.it/splitmix64.c.
    """
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, rounds: int) -> tuple[tuple[np.uint64, np.uint64], ...]:
    """Per round, the pair (odd multiplier, offset): a SplitMix64 stream that starts at mix(mix(seed + gamma) + epoch).

    For one seed different epochs start at different states, and for one epoch different seeds do.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value <= _MASK:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    state = _mix((_mix((seed + _GAMMA) & _MASK) + epoch) & _MASK)
    stream = [_mix((state + i * _GAMMA) & _MASK) for i in range(1, 2 * rounds + 1)]
    return tuple((np.uint64(k | 1), np.uint64(c)) for k, c in zip(stream[::2], stream[1::2]))


def _feistel(
    values: NDArray[np.uint64], a: int, b: int, keys: tuple[tuple[np.uint64, np.uint64], ...]
) -> NDArray[np.uint64]:
    """A keyed bijection on [0, a * b); uint64 [m] -> uint64 [m]. a and b are at most 2**32.

    A round adds to one half, modulo its size, a hash of the other: multiply, fold, multiply, keep the high 32 bits,
    scale them to the size (Lemire, "Fast random integer generation in an interval", 2019).
    """
    left = values // np.uint64(b)
    right = values - left * np.uint64(b)
    t = np.empty_like(values)
    spare = np.empty_like(values)
    half, size, other, other_size = left, np.uint64(a), right, np.uint64(b)
    for multiplier, offset in keys:
        np.multiply(other, multiplier, out=t)
        np.add(t, offset, out=t)
        np.right_shift(t, _SHIFT, out=spare)
        np.bitwise_xor(t, spare, out=t)
        np.multiply(t, _MULTIPLIER, out=t)
        np.right_shift(t, _SHIFT, out=t)
        np.multiply(t, size, out=t)
        np.right_shift(t, _SHIFT, out=t)
        np.add(half, t, out=half)
        np.subtract(half, size, out=t)  # wraps to a huge value where half < size, so the minimum is half mod size
        np.minimum(half, t, out=half)
        half, size, other, other_size = other, other_size, half, size
    np.multiply(left, np.uint64(b), out=left)
    np.add(left, right, out=left)
    return left


def permute(positions: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Positions of an epoch's order -> sample indices. Random access: nothing is stored, each value is computed.

    Args:
        positions: integers in [0, n), any shape, any order, repeats allowed.
        n: samples in the data set, 1 <= n < 2**63.
        seed, epoch: each in [0, 2**64); different pairs give unrelated orders.

    Returns:
        int64 array of positions' shape with values in [0, n). For positions = arange(n) it is a permutation.

    Raises:
        ValueError: n, seed, epoch or a position is out of range.
        TypeError: positions are not integers.
    """
    if not 1 <= n < 2**63:
        raise ValueError(f"n must be in [1, 2**63), got {n}")
    keys = _keys(seed, epoch, ROUNDS if n >= TINY else ROUNDS_TINY)
    array = np.asarray(positions)
    flat = array.astype(np.int64, casting="same_kind").view(np.uint64).reshape(-1)  # negative becomes huge
    if flat.size and int(flat.max()) >= n:
        raise ValueError(f"positions must be in [0, {n})")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    for start in range(0, flat.size, _BLOCK):
        flat[start : start + _BLOCK] = _feistel(flat[start : start + _BLOCK], a, b, keys)
    # Cycle walking: a value outside [0, n) goes through the bijection again until it is inside. It always gets there,
    # because following the cycle leads back to the position it came from, which is inside.
    outside = np.flatnonzero(flat >= np.uint64(n))
    while outside.size:
        flat[outside] = _feistel(flat[outside], a, b, keys)
        outside = outside[flat[outside] >= np.uint64(n)]
    return flat.view(np.int64).reshape(array.shape)


def shard(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """[start, stop) of this rank's contiguous shard of `length` items; sizes differ by at most one.

    The first length % world_size ranks take one more (as `numpy.array_split` cuts); a shard may be empty.

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


class Rows(NamedTuple):
    """Which rows of a global batch a rank has: from ``first`` on, of ``global_size`` over all ranks."""

    first: int
    global_size: int


@dataclass(frozen=True)
class GlobalBatches:
    """The samples of every training step, cut into one rank's shards.

    `step` counts the updates done before this one, from 0, on through all epochs. An epoch's last batch holds what is
    left and may be smaller; it counts as a step, unless ``drop_last``: then an epoch leaves those samples out.

    Args:
        n: samples in the data set, in [1, 2**63).
        global_batch_size: samples in a step, over all ranks; at least 1.
        seed: in [0, 2**64); with the epoch it decides the order.
        rank, world_size: which shard of each batch `indices` gives.

    Raises:
        ValueError: an argument is out of range, or nothing is left; every method raises it for step < 0.
    """

    n: int
    global_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = field(default=False, kw_only=True)
    # By step, what `indices` has computed; None for the step that comes next.
    _known: dict[int, NDArray[np.int64] | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {self.global_batch_size}")
        if self.drop_last and self.global_batch_size > self.n:
            raise ValueError(
                f"global_batch_size must be at most {self.n} to leave a batch, got {self.global_batch_size}"
            )
        shard(0, self.rank, self.world_size)  # these two check the rest
        permute(np.empty(0, np.int64), self.n, self.seed, 0)

    @property
    def steps_per_epoch(self) -> int:
        """Updates in an epoch: ceil(n / global_batch_size); with ``drop_last`` the floor of it."""
        return self.n // self.global_batch_size if self.drop_last else -(-self.n // self.global_batch_size)

    def _locate(self, step: int) -> tuple[int, int, int]:
        """The epoch of this step, and [start, stop) of its global batch in that epoch's order."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.global_batch_size
        return epoch, start, min(start + self.global_batch_size, self.n)

    def epoch(self, step: int) -> int:
        """The epoch this step belongs to, from 0."""
        return self._locate(step)[0]

    def _shard(self, size: int, k: int, count: int) -> tuple[int, int]:
        """[first, stop) of a global batch's rows: this rank's shard of its k-th of ``count`` micro-batches, from 0."""
        first, stop = shard(size, k, count)
        begin, end = shard(stop - first, self.rank, self.world_size)
        return first + begin, first + end

    def rows(self, step: int, micro_batch: tuple[int, int] = (0, 1)) -> Rows:
        """Which rows of this step's global batch `indices` gives."""
        size = self.size(step)
        return Rows(self._shard(size, *micro_batch)[0], size)

    def size(self, step: int) -> int:
        """Samples in this step's global batch, over all ranks; at least 1."""
        _, start, stop = self._locate(step)
        return stop - start

    def samples_seen(self, step: int) -> int:
        """Samples that the steps 0 .. step - 1 took, over all ranks."""
        epoch, start, _ = self._locate(step)
        return epoch * min(self.n, self.steps_per_epoch * self.global_batch_size) + start

    def indices(self, step: int, micro_batch: tuple[int, int] = (0, 1)) -> NDArray[np.int64]:
        """This rank's shard of this step's global batch, or of ``micro_batch`` (k, count), the k-th of the parts into
        which it is cut before ranks are: int64 [m], sample indices; m = 0 where ranks outnumber them.

        Who asks for one step after the other gets them from blocks of up to AHEAD samples; a seek computes its own.
        """
        known, steps, places = self._known if micro_batch == (0, 1) else {}, range(step, step + 1), []
        if (found := known.get(step)) is not None:
            return found
        if step in known:
            most = AHEAD // (self.global_batch_size // self.world_size + 1)
            steps = range(step, step + max(1, min(most, self.steps_per_epoch - step % self.steps_per_epoch)))
        for _, start, stop in map(self._locate, steps):
            first, last = self._shard(stop - start, *micro_batch)
            places.append(np.arange(start + first, start + last, dtype=np.int64))
        order = permute(np.concatenate(places), self.n, self.seed, self.epoch(step))
        shards = np.split(order, np.cumsum([len(each) for each in places[:-1]], dtype=np.int64))
        known.clear()
        known.update({**dict(zip(steps, shards)), steps.stop: None})
        return shards[0]


def step_seed(seed: int, step: int) -> int:
    """The seed, in [0, 2**64), of the random numbers (dropout) of one step, the same on every rank.

    Derived, so never saved. A rank that draws for the whole global batch and takes its rows drops alike at any size.
    """
    return _mix((_mix((seed + _GAMMA) & _MASK) ^ step) & _MASK)


def sample_bits(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 random bits, uint64 [m], for each of an epoch's samples ``indices`` [m], whatever rank or batch it is in."""
    z = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(step_seed(seed, epoch))
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLIER  # as `_mix`, of the epoch's stream at the samples' places
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
