"""Sum values in a fixed binary tree, so that the bits of the sum do not depend on the world size.

The leaves 0 to L - 1 are the values of a step's micro-batches. A node is the sum of the leaves [begin, end). The left
child of a node with n leaves has the first m of them, where m is the largest power of two below n. The right child has
the other n - m leaves. A rank has contiguous leaves, and adds all siblings among its nodes. The ranks exchange the
remaining nodes, whose number per rank grows with log2(L). Floating-point addition is not associative, but each node is
the sum of the same two values at any world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from samestep.sharding import shard

Value = TypeVar("Value")
Node = tuple[int, int, Any]  # (begin, end, sum of the leaves [begin, end) as a number, array or tensor)
Layout = Sequence[Sequence[tuple[int, int]]]  # for each rank, [begin, end) of each node that remains on the rank


def push(nodes: list[Node], leaves: int, begin: int, end: int, value: Any) -> None:
    """Append a node, and add the last two nodes in place while they are siblings.

    Args:
        nodes: the nodes so far, changed in place.
        leaves: number of leaves of the tree.
        begin: first leaf of the node.
        end: last leaf of the node, plus 1.
        value: sum of the node's leaves.
    """
    nodes.append((begin, end, value))
    while len(nodes) > 1:
        (first, middle, left), (_, last, right) = nodes[-2:]
        width = middle - first
        if first % (2 * width) or (last - middle < width and last < leaves):
            return
        left += right
        nodes[-2:] = [(first, last, left)]


def tree_sum(leaves: int, layout: Layout, values: Iterable[Value]) -> Value:
    """Return the sum of all leaves. Change the values in place.

    Args:
        leaves: number of leaves.
        layout: for each rank, [begin, end) of each of its nodes.
        values: the value of each node, in the order of ``layout``.
    """
    nodes: list[Node] = []
    for (begin, end), value in zip(chain(*layout), values):
        push(nodes, leaves, begin, end, value)
    total: Value = nodes[0][2]
    return total


@lru_cache(maxsize=64)
def nodes_of_ranks(leaves: int, world_size: int) -> Layout:
    """Return, for each rank, the nodes [begin, end) that remain after the rank has pushed its leaves."""
    ranks = []
    for rank in range(world_size):
        nodes: list[Node] = []
        for leaf in range(*shard(leaves, rank, world_size)):
            push(nodes, leaves, leaf, leaf + 1, 0)
        ranks.append([(begin, end) for begin, end, _ in nodes])
    return ranks
