"""Sum values in one fixed binary tree, so that no bit of the sum depends on the number of ranks.

The leaves 0 to L - 1 are the micro-batches of a step. A node sums the leaves [begin, end): its left child has the
largest power of two of them, and its right child the rest. A rank's leaves are contiguous. It adds its nodes alone, and
ranks exchange the at most log2(L) + 1 nodes that it could not join. Floating-point addition is not associative, but
every sum here has the same two terms at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from samestep.sharding import shard

Value = TypeVar("Value")
Node = tuple[int, int, Any]  # begin, end, and the sum of the leaves [begin, end): numbers, arrays or tensors
Layout = Sequence[Sequence[tuple[int, int]]]  # by rank, [begin, end) of each node that the rank could not join


def push(nodes: list[Node], leaves: int, begin: int, end: int, value: Any) -> None:
    """Append the node [begin, end) of a tree of ``leaves``, and add siblings, in place, until the last two are none.

    Args:
        nodes: the tree so far, changed in place.
        leaves: number of leaves of the whole tree.
        begin: first leaf of the node.
        end: leaf after its last one.
        value: sum over its leaves.
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
    """Return the sum of a whole tree from the ``values`` of all nodes in ``layout``, in order; it changes them.

    Args:
        leaves: number of leaves.
        layout: by rank, [begin, end) of each of its nodes.
        values: one for each node of the layout, in order.
    """
    nodes: list[Node] = []
    for (begin, end), value in zip(chain(*layout), values):
        push(nodes, leaves, begin, end, value)
    total: Value = nodes[0][2]
    return total


@lru_cache(maxsize=64)
def nodes_of_ranks(leaves: int, world_size: int) -> Layout:
    """Return the nodes [begin, end) that each rank is left with after it has pushed its leaves, in order of ranks."""
    ranks = []
    for rank in range(world_size):
        nodes: list[Node] = []
        for leaf in range(*shard(leaves, rank, world_size)):
            push(nodes, leaves, leaf, leaf + 1, 0)
        ranks.append([(begin, end) for begin, end, _ in nodes])
    return ranks
