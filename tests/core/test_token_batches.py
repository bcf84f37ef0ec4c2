"""Test batches by tokens: undivided samples, equal micro-batches at any world size, and the number of losses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep.data.token_batches import TokenBatches, cut_by_tokens

LENGTHS = np.array([5, 9, 2, 7, 7, 3, 8, 4, 6, 1, 9, 2], np.int64)  # 63 tokens
TARGETS = np.array([1, 8, 1, 3, 7, 2, 1, 4, 2, 1, 5, 1], np.int64)  # 36 losses


def batches(**settings: int) -> TokenBatches:
    sizes = {"step_tokens": 20, "micro_tokens": 12, "seed": 3, **settings}
    return TokenBatches(lengths=LENGTHS, targets=TARGETS, **sizes)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    step_tokens=st.integers(60, 200),
    micro_tokens=st.integers(30, 90),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_each_sample_once_and_no_empty_step(
    lengths: list[int], step_tokens: int, micro_tokens: int, world_size: int, epoch: int
) -> None:
    sizes = np.array(lengths, np.int64)
    settings = {"step_tokens": step_tokens, "micro_tokens": micro_tokens, "seed": 1, "world_size": world_size}
    ranks = [TokenBatches(lengths=sizes, targets=sizes, rank=rank, **settings) for rank in range(world_size)]
    steps = range(epoch * ranks[0].steps_per_epoch, (epoch + 1) * ranks[0].steps_per_epoch)
    seen = []
    for step in steps:
        own = np.concatenate([rank.indices(step) for rank in ranks])
        assert len(own) == ranks[0].size(step) > 0
        assert sizes[own].sum() <= step_tokens + sizes.max()
        for part in ranks[0].plan(step):
            assert len(part) * sizes[part].max() <= micro_tokens
        seen += own.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_micro_batches_are_the_same_at_any_number_of_ranks() -> None:
    alone = batches()
    for step in range(2 * alone.steps_per_epoch):
        expected = [part.tolist() for part in alone.plan(step)]
        for world_size in (2, 3, 5):
            found = []
            for rank in range(world_size):
                part = dataclasses.replace(alone, rank=rank, world_size=world_size)
                own = [part.indices(step, each) for each in part.micro_batches(step)]
                rows = [len(part.local_rows(step, each)) for each in part.micro_batches(step)]
                assert rows == [len(each) for each in own]
                assert np.concatenate([np.empty(0, np.int64), *own]).tolist() == part.indices(step).tolist()
                found += [each.tolist() for each in own]
            assert found == expected


def test_counts_of_losses_are_those_of_the_targets() -> None:
    plan = batches()
    seen = 0
    for step in range(2 * plan.steps_per_epoch):
        samples = np.concatenate(plan.plan(step))
        assert plan.num_losses_before(step) == seen
        assert plan.num_losses(step) == TARGETS[samples].sum()
        seen += plan.num_losses(step)
    assert seen == 2 * TARGETS.sum()
    assert plan.samples_seen(plan.steps_per_epoch) == len(LENGTHS)


def test_the_steps_of_earlier_versions_stay() -> None:
    """A resume of an earlier version's run takes the same steps."""
    plan = batches()
    assert plan.steps_per_epoch == 4
    assert [[part.tolist() for part in plan.plan(step)] for step in (0, 3, 4)] == [
        [[6], [8, 7], [9]],
        [[10]],
        [[4], [8, 0], [2]],
    ]


def test_samples_of_equal_length_keep_their_order() -> None:
    lengths = np.array([2, 4, 2, 4], np.int64)
    parts = cut_by_tokens(lengths, np.array([2, 3, 0, 1]), micro_tokens=8)
    assert [part.tolist() for part in parts] == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_tokens": 8}, "micro_tokens must be at least the longest sample, 9, got 8"),
        ({"step_tokens": 8}, "step_tokens must be at least twice the longest sample, 9, got 8"),
        ({"step_tokens": 0}, "step_tokens must be at least 1, got 0"),
        ({"rank": 2}, "rank"),
    ],
)
def test_a_bad_argument_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(**settings)
