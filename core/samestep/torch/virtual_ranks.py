"""Reduce the gradients of micro-batches in the fixed binary tree of `samestep.virtual_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.sharding import GlobalBatches
from samestep.torch.batch_norm import GlobalBatchNorm
from samestep.virtual_ranks import Layout, Node, nodes_of_ranks, push, tree_sum

GATHER_MAX_BYTES = 2**22  # maximum bytes of all ranks' nodes for which every rank gathers and adds all nodes
AllToAll = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


def all_to_all(tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Exchange slices of a flat tensor between all ranks. This call is a collective.

    Args:
        tensor: float [sum(send)].
        send: number of values for each rank.
        receive: number of values from each rank.

    Returns:
        float [sum(receive)], in rank order.
    """
    received = tensor.new_empty(sum(receive))
    dist.all_to_all_single(received, tensor, list(receive), list(send))  # collective
    return received


def all_gather(tensor: Tensor) -> Tensor:
    """Return all ranks' ``tensor`` [k] as [world_size * k], in rank order. This call is a collective."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)  # collective
    return torch.cat(gathered)


class GradientTree:
    """Sum the gradients and losses of a step's micro-batches, with the same bits at any world size.

    The tree replaces DDP's reduction. A rank stores a few sums of gradients, the nodes of `samestep.virtual_ranks`. The
    ranks exchange these sums after the last micro-batch. If the gradients are large, each rank sums one slice of them,
    and sends and receives about as many bytes as an all-reduce.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: GlobalBatches,
        buffers: Sequence[Tensor] = (),
        all_to_all: AllToAll = all_to_all,
        all_gather: Callable[[Tensor], Tensor] = all_gather,
    ) -> None:
        """Prepare the sums of the parameters' gradients. All gradients must have the same dtype.

        The tree also sums the statistics of norms that `exact` has replaced, and updates their running statistics.

        Args:
            model: the model with the parameters.
            batches: the run's global batches, for this rank.
            buffers: tensors that each micro-batch overwrites, such as statistics of a norm. The tree also sums them.
            all_to_all: the framework's collective, with the interface of this module's `all_to_all`.
            all_gather: the framework's collective, with the interface of this module's `all_gather`.
        """
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms = [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]
        self._norms = [norm for norm in norms if norm.sums is not None]
        self._buffers = [*buffers, *(norm.sums for norm in self._norms if norm.sums is not None)]
        self._batches = batches
        self._all_to_all = all_to_all
        self._all_gather = all_gather
        self._sizes = [tensor.numel() for tensor in (*self._parameters, *self._buffers)]
        self._sizes.append(1)  # the size of the loss
        self._padding = self._parameters[0].new_zeros(-sum(self._sizes) % batches.world_size)  # for equal slices
        self._nodes: list[Node] = []

    def add(self, micro_batch: tuple[int, int], loss: Tensor) -> None:
        """Add the gradients of one micro-batch to the tree, and set the parameters' ``grad`` to None.

        This method copies gradients instead of adding them to zeros, because -0.0 + 0.0 is +0.0.

        Args:
            micro_batch: (k, count) of the micro-batch.
            loss: summed loss of the micro-batch, scalar tensor.
        """
        k, count = micro_batch
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters]
        parts = [*gradients, *self._buffers, loss.detach(), self._padding]
        row = torch.cat([part.reshape(-1).to(self._padding.dtype) for part in parts])
        for parameter in self._parameters:
            parameter.grad = None
        push(self._nodes, count, k, k + 1, row)

    def all_reduce(self, step: int) -> Tensor:
        """Set the gradient of each parameter to the sum over the global batch. This call is a collective.

        Args:
            step: number of updates done before this step.

        Returns:
            The summed loss of the global batch on rank 0, and 0 on all other ranks, so that the sum over ranks is this
            loss.
        """
        nodes = self._nodes
        self._nodes = []
        if self._batches.world_size == 1:
            _, _, total = nodes[0]
        else:
            total = self._exchange(nodes, step)
        *sums, loss = total[: sum(self._sizes)].split(self._sizes)
        for parameter, gradient in zip(self._parameters, sums):
            parameter.grad = gradient.view_as(parameter)
        for buffer, each in zip(self._buffers, sums[len(self._parameters) :]):
            buffer.copy_(each.view_as(buffer))
        for norm in self._norms:
            norm.update_from_sums()
        own: Tensor = loss[0]
        if self._batches.rank != 0:
            return torch.zeros_like(own)
        return own

    def _exchange(self, nodes: list[Node], step: int) -> Tensor:
        """Return the sum of all ranks' ``nodes``. If the nodes are large, each rank adds only one slice."""
        leaves = self._batches.num_micro_batches(step)
        layout = nodes_of_ranks(leaves, self._batches.world_size)
        size = sum(self._sizes) + len(self._padding)
        rows = self._padding.new_empty(0, size)
        if nodes:
            rows = torch.stack([row for _, _, row in nodes])
        most = max(map(len, layout))
        gathered_bytes = self._batches.world_size * most * size * rows.element_size()
        if gathered_bytes <= GATHER_MAX_BYTES:  # use one collective instead of two
            return self._sum_all(rows, leaves, layout)
        return self._sum_slices(rows, leaves, layout)

    def _sum_all(self, rows: Tensor, leaves: int, layout: Layout) -> Tensor:
        """Gather all ranks' nodes on every rank, and return their sum, [size].

        Args:
            rows: [own nodes, size], one row per node.
            leaves: number of micro-batches of the step.
            layout: the nodes of each rank.
        """
        most = max(map(len, layout))
        padded = F.pad(rows, (0, 0, 0, most - len(rows)))
        gathered = self._all_gather(padded.view(-1)).view(len(layout), most, -1)
        of_ranks = [of_rank[: len(nodes)] for of_rank, nodes in zip(gathered, layout)]
        total: Tensor = tree_sum(leaves, layout, chain(*of_ranks))
        return total

    def _sum_slices(self, rows: Tensor, leaves: int, layout: Layout) -> Tensor:
        """Return the sum of all ranks' nodes. Each rank adds one slice. The arguments are as in `_sum_all`."""
        world_size = len(layout)
        width = rows.shape[1] // world_size
        slices = rows.view(-1, world_size, width).transpose(0, 1).reshape(-1)  # ordered by rank, then by node
        send = [len(rows) * width] * world_size
        receive = [len(nodes) * width for nodes in layout]
        received = self._all_to_all(slices, send, receive)
        return self._all_gather(tree_sum(leaves, layout, received.view(-1, width)))
