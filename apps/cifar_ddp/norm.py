"""Batch normalisation over the global batch: the same statistics at any number of ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors [k], and in backward that of all ranks' gradients of it.

    Each rank's loss rests on every rank's tensor: without the second sum each would see its own samples' share alone.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)  # ranks talk
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)  # ranks talk
        return total


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """As torch's, with statistics of all ranks' samples: of a micro-batch, where a global batch is cut into some.

    torch's SyncBatchNorm is for GPUs alone. What is usually done without it, statistics of each rank's own samples,
    makes another training of each number of ranks, and another model of each rank.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(self, channels: int, frozen: bool = False) -> None:
        """``frozen``: by the stored statistics, which stay as they are, also in training."""
        super().__init__(channels)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        """x [m, c, h, w] to the same shape and dtype; m may be 0 on a rank, where another has samples."""
        if self.frozen or not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        wide = x if x.dtype == torch.float64 else x.float()  # under autocast x is bfloat16
        count = torch.full((1,), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device)
        # Ranks may have unlike numbers of samples, so what they add up are sums, and their number.
        mine = torch.cat([wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3)), count])
        sums: Tensor = SumOverRanks.apply(mine)  # type: ignore[no-untyped-call]  # ranks talk, also in backward
        mean, square, total = (*(sums[:-1] / sums[-1]).chunk(2), sums[-1].detach())
        variance = (square - mean.square()).clamp_min(0)  # rounding may leave it below
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * total / (total - 1).clamp_min(1), self.momentum)  # the unbiased, as torch
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (wide * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


def make_norm(kind: str, frozen: bool, channels: int) -> nn.Module:
    """``kind`` "batch", or "group": of 8 groups of a sample's channels, which needs no other sample."""
    return GlobalBatchNorm2d(channels, frozen) if kind == "batch" else nn.GroupNorm(8, channels)
