"""Test the global sample order: a fixed permutation, equal at any world size, and fast at any dataset size."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from samestep import sharding
from samestep.sharding import BatchSlice, GlobalBatches, permute, sample_bits, shard, step_seed

SEEDS = st.integers(0, 2**64 - 1)
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 3000), st.sampled_from([1023, 1024, 1025, 2**11, 2**11 + 1]))
WORLDS = st.integers(1, 9)
quick = settings(deadline=None, max_examples=60)


def order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permute(np.arange(n), n, seed, epoch)


def z_score(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    """Return Pearson's chi-square in standard deviations from its mean. The orders are fixed, so no test is flaky."""
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


# The order


@quick
@given(SIZES, SEEDS, st.integers(0, 2**64 - 1))
def test_an_order_has_each_sample_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(order(n, seed, epoch)), np.arange(n))


def test_an_order_has_each_sample_once_at_mnist_size_and_over_block_boundaries() -> None:
    assert np.array_equal(np.sort(order(60_000, 0, 0)), np.arange(60_000))


@quick
@given(st.integers(1, 2**63 - 1), SEEDS, st.data())
def test_any_part_of_an_order_is_computed_without_the_rest(n: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), np.int64)
    indices = permute(positions, n, seed, 3)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < n
    assert np.array_equal(indices, [permute(np.array(p), n, seed, 3) for p in positions])
    assert len(set(indices.tolist())) == len(set(positions.tolist()))
    assert np.array_equal(permute(positions.reshape(1, -1), n, seed, 3), indices.reshape(1, -1))


def test_permute_leaves_its_argument_unchanged() -> None:
    positions = np.arange(10)
    permute(positions, 10, 0, 0)
    assert np.array_equal(positions, np.arange(10))


GOLDEN_2 = [[0, 1], [1, 0], [0, 1], [1, 0]]
GOLDEN_3 = [1, 0, 2]
GOLDEN_10 = [6, 7, 4, 9, 3, 5, 8, 2, 0, 1]
GOLDEN_10_EPOCH_1 = [6, 1, 3, 4, 2, 9, 5, 0, 7, 8]
GOLDEN_10_SEED_1 = [8, 4, 7, 6, 9, 3, 0, 1, 2, 5]
GOLDEN_FIRST_5 = {
    (1023, 7, 2): [890, 799, 663, 234, 972],
    (1024, 7, 2): [420, 348, 630, 522, 40],
    (60000, 0, 0): [40287, 55191, 20189, 45603, 54142],
    (60000, 18446744073709551615, 5): [7024, 30918, 19299, 37831, 28588],
    (1000000000000, 42, 1): [442482158864, 290758065834, 765366172699, 977755654231, 250604564610],
    (4611686018427387904, 1, 0): [
        126175443398758711,
        1310751775925751109,
        560997002754877204,
        343783626897523384,
        4574192190176065286,
    ],
}


def test_golden_orders() -> None:
    """Never edit these values: if an order changes, runs that resume repeat some samples and miss others."""
    assert order(1, 0, 0).tolist() == [0]
    assert [order(2, 0, epoch).tolist() for epoch in range(4)] == GOLDEN_2
    assert order(3, 0, 0).tolist() == GOLDEN_3
    assert order(10, 0, 0).tolist() == GOLDEN_10
    assert order(10, 0, 1).tolist() == GOLDEN_10_EPOCH_1
    assert order(10, 1, 0).tolist() == GOLDEN_10_SEED_1
    for (n, seed, epoch), first in GOLDEN_FIRST_5.items():
        assert permute(np.arange(5), n, seed, epoch).tolist() == first, (n, seed, epoch)


def reference(position: int, n: int, seed: int, epoch: int) -> int:
    """Return the sample at one position of the order, computed with Python's integers and without NumPy."""
    rounds = 8 if n >= 1024 else 32
    mask = 2**64 - 1
    state = sharding.splitmix64((sharding.splitmix64((seed + 0x9E3779B97F4A7C15) & mask) + epoch) & mask)
    stream = [sharding.splitmix64((state + i * 0x9E3779B97F4A7C15) & mask) for i in range(1, 2 * rounds + 1)]
    a = math.isqrt(n - 1) + 1
    b = (n + a - 1) // a
    value = position
    while True:
        halves = list(divmod(value, b))
        sizes = (a, b)
        for i in range(rounds):
            hashed = (halves[1 - i % 2] * (stream[2 * i] | 1) + stream[2 * i + 1]) & mask
            hashed = (hashed ^ (hashed >> 32)) * 0xBF58476D1CE4E5B9 & mask
            halves[i % 2] = (halves[i % 2] + ((hashed >> 32) * sizes[i % 2] >> 32)) % sizes[i % 2]
        value = halves[0] * b + halves[1]
        if value < n:
            return value


@quick
@given(st.one_of(SIZES, st.integers(1, 2**63 - 1)), SEEDS, st.integers(0, 1000), st.data())
def test_permute_equals_the_reference(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    expected = [reference(position, n, seed, epoch) for position in positions]
    assert permute(np.array(positions, np.int64), n, seed, epoch).tolist() == expected


def test_mixer_is_splitmix64() -> None:
    """The expected values are the first outputs of the published SplitMix64 for the seed 1234567."""
    outputs = [sharding.splitmix64((1234567 + i * sharding._GAMMA) % 2**64) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


# Random bits of samples


@quick
@given(SEEDS, st.integers(0, 1000), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_the_bits_of_samples_are_a_splitmix64_stream_at_their_places(seed: int, epoch: int, indices: list[int]) -> None:
    start = step_seed(seed, epoch)
    expected = [sharding.splitmix64((start + (index + 1) * sharding._GAMMA) % 2**64) for index in indices]
    bits = sample_bits(seed, epoch, np.array(indices, np.int64))
    assert bits.dtype == np.uint64
    assert bits.tolist() == expected


def test_the_bits_of_samples_stay_for_ever() -> None:
    """The crops and flips of resumed runs depend on these bits."""
    assert sample_bits(1, 3, np.array([0, 1, 49_999])).tolist() == [
        13625505645108458277,
        8269527995984263926,
        12528728800330394656,
    ]
    assert sample_bits(1, 3, np.empty(0, np.int64)).shape == (0,)


def test_the_bits_of_samples_are_even_and_those_of_epochs_and_seeds_unrelated() -> None:
    everything = np.arange(50_000)
    one = sample_bits(1, 0, everything)
    assert len(set(one.tolist())) == 50_000
    for bit in range(64):
        assert abs(int((one >> np.uint64(bit) & np.uint64(1)).sum()) - 25_000) < 5 * math.sqrt(12_500)
    for other in (sample_bits(1, 1, everything), sample_bits(2, 0, everything), np.roll(one, 1)):
        differing = np.bitwise_count(one ^ other).sum()
        assert abs(int(differing) - 32 * 50_000) < 5 * math.sqrt(16 * 50_000)


# Quality of the order


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_permutation_of_a_tiny_set_is_equally_likely(n: int) -> None:
    epochs = 100 * math.factorial(n)
    seen = [tuple(order(n, 5, epoch).tolist()) for epoch in range(epochs)]
    counts = np.array([seen.count(p) for p in itertools.permutations(range(n))])
    assert z_score(counts, 100.0) < 4


@pytest.mark.parametrize("n", [5, 7, 16, 17, 100, 1024, 1100, 5000])
def test_orders_are_uniform(n: int) -> None:
    """Compare the counts of (position, value), of values at some distances, and of values in pairs of epochs."""
    epochs = max(20, min(1000, 200_000 // n))
    orders = np.array([order(n, 11, epoch) for epoch in range(epochs)])
    cells = min(n, 10)
    share = np.bincount(np.arange(n) * cells // n).astype(float)  # values in each cell
    cell = orders * cells // n
    both = np.outer(share, share)

    def table(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount((rows * cells + columns).ravel(), minlength=cells**2)

    place = np.broadcast_to(np.arange(n) * cells // n, orders.shape)
    assert z_score(table(place, cell), both.ravel() * epochs / n) < 4
    assert z_score(table(cell[:-1:2], cell[1::2]), both.ravel() * (epochs // 2) / n) < 4
    pairs = (both - np.diag(share)).ravel()  # a value is never followed by itself
    a = math.isqrt(n - 1) + 1
    for distance in {1, 2, a - 1, a, -(-n // a)}:
        counts = table(cell[:, :-distance], cell[:, distance:])[pairs > 0]
        assert z_score(counts, pairs[pairs > 0] * counts.sum() / pairs.sum()) < 4, distance
        steps = np.bincount(((orders[:, distance:] - orders[:, :-distance]) % n).ravel(), minlength=n)
        assert steps[0] == 0
        assert z_score(steps[1:], counts.sum() / (n - 1)) < 4, distance


def test_seeds_and_epochs_are_unrelated() -> None:
    orders = [order(5000, seed, epoch) for seed in (0, 1, 2**63, 2**64 - 1) for epoch in (0, 1, 2)]
    for one, other in itertools.combinations(orders, 2):
        assert np.sum(one == other) < 10  # Poisson-distributed with mean 1
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(5000)


# Cost of the order


def count_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of the bijection appends its number of values."""
    evaluated: list[int] = []
    feistel = sharding._feistel

    def counted(values: NDArray[np.uint64], *rest: Any) -> NDArray[np.uint64]:
        evaluated.append(values.size)
        return feistel(values, *rest)

    monkeypatch.setattr(sharding, "_feistel", counted)
    return evaluated


def test_a_trillion_samples_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = count_evaluations(monkeypatch)
    tracemalloc.start()
    try:
        batches = GlobalBatches(10**12, 256, seed=0, rank=1, world_size=2)
        indices = batches.indices(0)
        batches.indices(10**9)  # a resume is a seek
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert indices.shape == (128,)
    assert peak < 1_000_000
    assert sum(evaluated) <= 2 * 128 + 2


@pytest.mark.parametrize("n", [2**10 + 1, 2**20 - 1, 2**20, 2**20 + 1, 60_000, 10**9, 2**62 + 1])
def test_just_above_a_power_of_two_hardly_any_position_is_computed_twice(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset just above a power of two costs about as much as a dataset just below it."""
    evaluated = count_evaluations(monkeypatch)
    count = min(n, 100_000)
    permute(np.arange(count), n, 0, 0)
    assert sum(evaluated) <= 1.04 * count


# Shards and batches


@quick
@given(st.integers(0, 10**6), WORLDS)
def test_shards_tile_and_differ_by_at_most_one(length: int, world_size: int) -> None:
    shards = [shard(length, rank, world_size) for rank in range(world_size)]
    assert [start for start, _ in shards] == [0, *(stop for _, stop in shards[:-1])]
    assert shards[-1][1] == length
    sizes = [stop - start for start, stop in shards]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 300), st.integers(1, 400), SEEDS, WORLDS, st.integers(0, 50))
def test_same_global_batches_at_any_world_size(n: int, batch: int, seed: int, world_size: int, step: int) -> None:
    whole = GlobalBatches(n, batch, seed)
    ranks = [GlobalBatches(n, batch, seed, rank, world_size) for rank in range(world_size)]
    shards = [rank.indices(step) for rank in ranks]
    assert np.array_equal(np.concatenate(shards), whole.indices(step))
    assert sum(map(len, shards)) == ranks[0].size(step)


@quick
@given(st.integers(1, 300), st.integers(1, 400), SEEDS, WORLDS, st.integers(0, 50))
def test_rows_say_where_a_ranks_indices_stand_in_the_global_batch(
    n: int, batch: int, seed: int, world_size: int, step: int
) -> None:
    whole = GlobalBatches(n, batch, seed).indices(step)
    for rank in range(world_size):
        batches = GlobalBatches(n, batch, seed, rank, world_size)
        indices, (first, global_size) = batches.indices(step), batches.rows(step)
        assert batches.rows(step) == BatchSlice(first, global_size)
        assert global_size == len(whole)
        assert np.array_equal(whole[first : first + len(indices)], indices)


@quick
@given(st.integers(1, 300), st.integers(1, 400), SEEDS, WORLDS, st.integers(0, 50), st.integers(1, 9))
def test_micro_batches_hold_the_same_samples_at_any_world_size(
    n: int, batch: int, seed: int, world_size: int, step: int, count: int
) -> None:
    whole = GlobalBatches(n, batch, seed)
    ranks = [GlobalBatches(n, batch, seed, rank, world_size) for rank in range(world_size)]
    parts = [whole.indices(step, (k, count)) for k in range(count)]
    assert np.array_equal(np.concatenate(parts), whole.indices(step))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # micro-batches without samples come last
    for k, part in enumerate(parts):
        shards = [rank.indices(step, (k, count)) for rank in ranks]
        assert np.array_equal(np.concatenate(shards), part)
        for rank, indices in zip(ranks, shards):
            first, size = rank.rows(step, (k, count))
            assert size == whole.size(step)
            assert np.array_equal(whole.indices(step)[first : first + len(indices)], indices)


@quick
@given(
    st.integers(1, 300),
    st.integers(1, 60),
    WORLDS,
    st.sampled_from([None, 9, 12]),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_ranks_divide_the_micro_batches_of_a_step(
    n: int, batch: int, world_size: int, virtual_ranks: int | None, accumulate: int, step: int
) -> None:
    """A rank computes entire micro-batches if it has virtual ranks, otherwise a shard of each micro-batch."""
    options: dict[str, Any] = {"virtual_ranks": virtual_ranks, "accumulate": accumulate}
    ranks = [GlobalBatches(n, batch, 1, rank, world_size, **options) for rank in range(world_size)]
    size = ranks[0].size(step)
    count = min(size, accumulate * virtual_ranks if virtual_ranks else accumulate)
    assert ranks[0].num_micro_batches(step) == count
    own = [rank.micro_batches(step) for rank in ranks]
    everything = [(k, count) for k in range(count)]
    if virtual_ranks:
        assert [*itertools.chain(*own)] == everything
    else:
        assert own == [everything] * world_size
    rows = [row for rank in ranks for each in rank.micro_batches(step) for row in rank.local_rows(step, each)]
    assert sorted(rows) == list(range(size))
    assert ranks[0].num_losses(step) == size
    assert ranks[0].num_losses_before(step) == ranks[0].samples_seen(step)


def test_a_shard_of_the_whole_batch_is_the_default() -> None:
    assert GlobalBatches(10, 6, 1).micro_batches(0) == [(0, 1)]
    assert list(GlobalBatches(10, 6, 1, rank=1, world_size=2).local_rows(0)) == [3, 4, 5]


@quick
@given(st.integers(0, 300), st.integers(1, 60), WORLDS)
def test_evaluation_batches_have_each_example_once(length: int, batch_size: int, parts: int) -> None:
    batches = sharding.eval_batches(length, batch_size, parts)
    assert len(batches) == max(parts, math.ceil(length / batch_size))
    assert np.array_equal(np.concatenate(batches), np.arange(length))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= batch_size or len(batches) == parts
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 300), st.integers(1, 400), SEEDS, WORLDS)
def test_an_epoch_sees_every_sample_once(n: int, batch: int, seed: int, world_size: int) -> None:
    ranks = [GlobalBatches(n, batch, seed, rank, world_size) for rank in range(world_size)]
    steps = ranks[0].steps_per_epoch
    seen = np.concatenate([rank.indices(step) for step in range(steps, 2 * steps) for rank in ranks])
    assert np.array_equal(np.sort(seen), np.arange(n))


@pytest.mark.slow
@quick
@given(st.integers(1, 300), st.integers(1, 60), SEEDS, st.integers(0, 40), WORLDS, WORLDS)
def test_resuming_at_another_world_size_misses_nothing(
    n: int, batch: int, seed: int, stop: int, before: int, after: int
) -> None:
    steps = GlobalBatches(n, batch, seed).steps_per_epoch
    stop = min(stop, steps)
    seen = [GlobalBatches(n, batch, seed, r, before).indices(step) for step in range(stop) for r in range(before)]
    seen += [GlobalBatches(n, batch, seed, r, after).indices(step) for step in range(stop, steps) for r in range(after)]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(n))


@pytest.mark.slow
@quick
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(0, 9), WORLDS, st.lists(st.integers(0, 60), max_size=4))
def test_who_walks_and_jumps_gets_what_a_seek_gives(
    n: int, batch: int, seed: int, world_size: int, starts: list[int]
) -> None:
    """Steps computed ahead, also across an epoch's end, equal steps computed one at a time."""
    arguments = (n, batch, seed, world_size - 1, world_size)
    walker = GlobalBatches(*arguments)
    for start in starts:
        for step in [*range(start, start + 40), start + 1]:
            assert np.array_equal(walker.indices(step), GlobalBatches(*arguments).indices(step)), step


def test_who_walks_computes_each_sample_once_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = count_evaluations(monkeypatch)
    batches = GlobalBatches(2**20, 128, seed=0, rank=1, world_size=2)
    for step in range(1000):
        batches.indices(step)
    assert sum(evaluated) <= 1.04 * (1000 * 64 + sharding.PREFETCH_SAMPLES)
    assert len(evaluated) < 100


@quick
@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 40))
def test_counters_equal_a_walk(n: int, batch: int, steps: int) -> None:
    """A seek to a step gives the same counters as a walk through all steps before it."""
    batches = GlobalBatches(n, batch, seed=1)
    epoch = seen = taken = 0
    for step in range(steps):
        assert (batches.epoch(step), batches.samples_seen(step)) == (epoch, seen)
        size = min(batch, n - taken)
        assert batches.size(step) == len(batches.indices(step)) == size
        assert np.array_equal(batches.indices(step), order(n, 1, epoch)[taken : taken + size])
        seen = seen + size
        taken = taken + size
        if taken == n:
            epoch = epoch + 1
            taken = 0


def test_last_batch_is_smaller_and_counts() -> None:
    batches = GlobalBatches(60_000, 128, seed=0)
    assert batches.steps_per_epoch == 469
    assert [batches.size(step) for step in (0, 467, 468, 469)] == [128, 128, 96, 128]
    assert [batches.epoch(step) for step in (468, 469)] == [0, 1]
    assert batches.samples_seen(469) == 60_000


@quick
@given(st.integers(1, 300), st.integers(1, 300), WORLDS, st.integers(0, 40))
def test_a_last_batch_that_is_dropped_leaves_the_others_as_they_are(
    n: int, batch: int, world_size: int, step: int
) -> None:
    """Each epoch drops the last samples of its own order, so epochs drop different samples."""
    if batch > n:
        with pytest.raises(ValueError, match="to leave a batch"):
            GlobalBatches(n, batch, 1, drop_last=True)
        return
    ranks = [GlobalBatches(n, batch, 1, rank, world_size, drop_last=True) for rank in range(world_size)]
    assert ranks[0].steps_per_epoch == n // batch
    epoch, place = divmod(step, n // batch)
    taken = np.concatenate([rank.indices(step) for rank in ranks])
    assert np.array_equal(taken, order(n, 1, epoch)[place * batch : (place + 1) * batch])
    assert (ranks[0].epoch(step), ranks[0].size(step), ranks[0].samples_seen(step)) == (epoch, batch, step * batch)


def test_a_rank_may_be_left_without_samples() -> None:
    empty = GlobalBatches(3, 2, seed=0, rank=3, world_size=4).indices(0)
    assert empty.shape == (0,)
    assert empty.dtype == np.int64


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1, 0),
        (2**63, 1, 0),
        (10, 0, 0),
        (10, 1, -1),
        (10, 1, 2**64),
        (10, 1, 0, 2, 2),
        (10, 1, 0, -1),
        (10, 1, 0, 0, 0),
    ],
)
def test_bad_batches_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GlobalBatches(*arguments)


def test_bad_calls_are_refused() -> None:
    batches = GlobalBatches(10, 2, seed=0)
    for method in (batches.epoch, batches.size, batches.rows, batches.samples_seen, batches.indices):
        with pytest.raises(ValueError, match="step must be at least 0"):
            method(-1)
    for positions in ([10], [-1]):
        with pytest.raises(ValueError, match="positions must be"):
            permute(np.array(positions), 10, 0, 0)
    with pytest.raises(ValueError, match="epoch must be"):
        permute(np.arange(3), 10, 0, -1)
    with pytest.raises(ValueError, match="length must be"):
        shard(-1, 0, 1)
    with pytest.raises(TypeError):
        permute(np.array([0.5]), 10, 0, 0)  # type: ignore[arg-type, unused-ignore]  # depends on NumPy's version
