"""Test the reduction tree of --virtual-ranks: equal sums at any world size, and few nodes per rank."""

from __future__ import annotations

from math import log2
from typing import Any

import numpy as np
import pytest
from samestep.sharding import GlobalBatches, shard
from samestep.virtual_ranks import Node, nodes_of_ranks, push


class Term(str):
    """Represent a sum by its terms: a + b is "(a+b)"."""

    __slots__ = ()

    def __iadd__(self, other: str) -> Any:
        return Term(f"({self}+{other})")


def sum_over_ranks(leaves: int, world_size: int) -> str:
    """Return the sum as ranks compute it, and check the nodes that remain on each rank."""
    merged: list[Node] = []
    for rank, expected in enumerate(nodes_of_ranks(leaves, world_size)):
        nodes: list[Node] = []
        for leaf in range(*shard(leaves, rank, world_size)):
            push(nodes, leaves, leaf, leaf + 1, Term(leaf))
            assert len(nodes) <= max(1, 2 * log2(leaves))
        assert [node[:2] for node in nodes] == list(expected)
        for node in nodes:
            push(merged, leaves, *node)
    ((begin, end, total),) = merged
    assert (begin, end) == (0, leaves)
    return str(total)


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8, 12, 13, 24, 64, 127])
def test_the_terms_of_every_sum_are_the_same_at_any_number_of_ranks(leaves: int) -> None:
    expected = sum_over_ranks(leaves, 1)
    assert all(sum_over_ranks(leaves, n) == expected for n in range(2, leaves + 3))


def test_the_left_child_is_the_largest_power_of_two() -> None:
    assert sum_over_ranks(3, 1) == "((0+1)+2)"
    assert sum_over_ranks(7, 3) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("virtual_ranks", "accumulate"), [(8, 1), (5, 3)])
def test_ranks_take_whole_sub_shards_that_do_not_depend_on_their_number(
    world_size: int, virtual_ranks: int, accumulate: int
) -> None:
    """With global batches of 24, the last batch has 2 of 50 samples; sub-shards without samples are left out."""
    one = GlobalBatches(50, 24, 7, accumulate=accumulate)
    for step in range(6):
        taken = []
        for rank in range(world_size):
            batches = GlobalBatches(50, 24, 7, rank, world_size, virtual_ranks, accumulate)
            for k, count in batches.micro_batches(step):
                first, _ = batches.rows(step, (k, count))
                expected = one.indices(step)[slice(*shard(one.size(step), k, count))]
                assert first == shard(one.size(step), k, count)[0]
                assert np.array_equal(batches.indices(step, (k, count)), expected)
                assert len(expected)
                taken.append(k)
            assert batches.num_micro_batches(step) == min(accumulate * virtual_ranks, one.size(step))
        assert taken == list(range(len(taken))) == list(range(min(accumulate * virtual_ranks, one.size(step))))


def test_without_virtual_ranks_each_rank_takes_a_shard_of_every_micro_batch() -> None:
    batches = [GlobalBatches(50, 24, 7, rank, 4, accumulate=3) for rank in range(4)]
    assert {tuple(each.micro_batches(0)) for each in batches} == {((0, 3), (1, 3), (2, 3))}
    assert batches[0].micro_batches(2) == [(0, 2), (1, 2)]  # the last batch has 2 samples
