"""Compute gradients with the same bits at any world size (--virtual-ranks)."""

from __future__ import annotations

from collections.abc import Callable

from samestep import ConfigError
from samestep.options import Options
from samestep.torch import GlobalBatchSampler, reduction
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def check_sub_shards(options: Options, sampler: GlobalBatchSampler) -> None:
    """Raise ConfigError if batch norm must compute statistics of a sub-shard with fewer than 2 samples."""
    batches = sampler.batches
    last = len(sampler) - 1
    size = batches.size(last)
    parts = batches.num_micro_batches(last)
    takes_statistics = options.norm == "batch" and not options.freeze_bn
    if takes_statistics and size < 2 * parts:
        raise ConfigError(
            f"--virtual-ranks: {size} samples of an epoch's last batch make {parts} sub-shards, and batch norm needs 2 "
            "in each: lower --virtual-ranks or --accumulate, or use --norm group"
        )


class VirtualRanks:
    """Split a global batch into the same sub-shards at any world size, and reduce their gradients in one tree.

    Args:
        ddp: the model. The tree replaces DDP's all-reduce.
        sampler: the sampler, whose micro-batches are the sub-shards.
        summed_loss: function of ``(options, model, images, labels)`` that returns the summed loss.
    """

    def __init__(
        self, ddp: DistributedDataParallel, sampler: GlobalBatchSampler, summed_loss: Callable[..., Tensor]
    ) -> None:
        tree = reduction.gradient_tree(ddp, sampler.batches)
        assert tree is not None
        self.tree = tree
        self.summed_loss = summed_loss

    def compute_gradients(
        self, options: Options, model: nn.Module, sampler: GlobalBatchSampler, images: Tensor, labels: Tensor
    ) -> Tensor:
        """Set ``.grad`` to the gradients of the global batch's mean loss.

        Returns:
            The summed loss of the global batch on rank 0, and 0 on other ranks, as a scalar tensor.
        """
        module = model.module if isinstance(model, DistributedDataParallel) else model  # DDP has nothing to prepare
        for sub_images, sub_labels in sampler.micro_batches((images, labels)):
            loss_sum = self.summed_loss(options, module, sub_images, sub_labels)
            sampler.scale(loss_sum).backward()
            assert sampler.micro_batch is not None
            self.tree.add(sampler.micro_batch, loss_sum)
        return self.tree.all_reduce(sampler.step - 1)  # collective
