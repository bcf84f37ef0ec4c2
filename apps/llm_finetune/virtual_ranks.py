"""Compute gradients with the same bits at any world size (--virtual-ranks)."""

from __future__ import annotations

from samestep.torch import reduction
from samestep.torch.token_sampler import GlobalTokenBatchSampler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class VirtualRanks:
    """Reduce the gradients of a step's micro-batches in one tree, which is the same at any world size.

    Args:
        ddp: the model. The tree replaces DDP's all-reduce.
        sampler: sampler of the micro-batches.
    """

    def __init__(self, ddp: DistributedDataParallel, sampler: GlobalTokenBatchSampler) -> None:
        tree = reduction.gradient_tree(ddp, sampler.batches)
        assert tree is not None
        self.tree = tree

    def compute_gradients(
        self, model: nn.Module, sampler: GlobalTokenBatchSampler, tokens: Tensor, labels: Tensor
    ) -> Tensor:
        """Set ``.grad`` to the gradients of the global batch's mean loss per target.

        Returns:
            The summed loss of the global batch on rank 0, and 0 on other ranks, as a scalar tensor.
        """
        for micro_tokens, micro_labels in sampler.micro_batches((tokens, labels)):
            loss_sum = model(micro_tokens, micro_labels)
            sampler.scale(loss_sum).backward()
            assert sampler.micro_batch is not None
            self.tree.add(sampler.micro_batch, loss_sum)
        return self.tree.all_reduce(sampler.step - 1)  # collective
