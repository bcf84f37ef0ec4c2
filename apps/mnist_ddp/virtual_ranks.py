"""Compute a training step with the same bits at any world size (--virtual-ranks)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samestep.torch import GlobalBatchSampler, reduction
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class VirtualRanks:
    """Split a global batch into the same sub-shards at any world size, and reduce their gradients in one tree."""

    def __init__(self, model: nn.Module, sampler: GlobalBatchSampler) -> None:
        tree = reduction.gradient_tree(model, sampler.batches)  # replaces DDP's all-reduce
        assert tree is not None
        self.tree = tree

    def train_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: GlobalBatchSampler,
        images: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Update with this rank's sub-shards. Return the global batch's summed loss on rank 0, and 0 on other ranks."""
        step = sampler.step - 1  # number of earlier updates
        module = model.module if isinstance(model, DistributedDataParallel) else model  # DDP has nothing to prepare
        optimizer.zero_grad()
        for sub_images, sub_labels in sampler.micro_batches((images, labels)):
            loss_sum = F.nll_loss(module(sub_images), sub_labels, reduction="sum")
            sampler.scale(loss_sum).backward()
            assert sampler.micro_batch is not None
            self.tree.add(sampler.micro_batch, loss_sum)
        loss_sum = self.tree.all_reduce(step)  # collective
        optimizer.step()
        return loss_sum
