"""Batch normalisation over the global batch: the same statistics at any number of ranks, on any device."""

from __future__ import annotations

from typing import Any

import ranks
import torch
import torch.nn.functional as F
from samestep.phases import Phases
from torch import Tensor, nn


class Normalise(torch.autograd.Function):
    """x [m, c, h, w] by its mean and variance over all ranks' samples, which are given back, and how many they are of.

    Written out, as the backward pass that autograd makes of it goes over the activations about twice as often.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, phases: Phases | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()  # under autocast x is bfloat16
        # Ranks may have unlike numbers of samples, so what they add up are sums, and their number. A variance is the
        # small difference of two of them: squares are taken from the rank's own mean, and added up in float64.
        n = x.numel() // x.shape[1]
        own = wide.sum((0, 2, 3)) / max(1, n)
        squares = (wide - own[:, None, None]).square_().sum((0, 2, 3)).double()
        own = own.double()
        sums = torch.cat([n * own, squares + n * own.square(), torch.full_like(own[:1], n)])
        add_up(sums, phases)  # ranks talk
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = (square - mean.square()).clamp_min(0).to(wide.dtype)  # rounding may leave it below
        mean, total = mean.to(wide.dtype), sums[-1].to(wide.dtype)
        rsqrt = torch.rsqrt(variance + eps)
        scale = weight * rsqrt
        ctx.phases = phases
        ctx.save_for_backward(x, mean, rsqrt, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return affine(wide, scale, bias - mean * scale).to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *of_statistics: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """By x, weight and bias; the last two by this rank's samples alone, as any parameter's: DDP adds them up."""
        x, mean, rsqrt, scale, total = ctx.saved_tensors
        wide, gradient = x.to(mean.dtype), gradient.to(mean.dtype)
        of_bias = gradient.sum((0, 2, 3))
        of_weight = ((gradient * wide).sum((0, 2, 3)) - mean * of_bias) * rsqrt
        # Every rank's loss rests on this rank's x, by the statistics: without this sum it would see its own alone.
        sums = torch.cat([of_weight, of_bias])
        add_up(sums, ctx.phases)  # ranks talk
        by_weight, by_bias = (sums / total).chunk(2)
        # scale * (gradient - by_bias - by_weight * (x - mean) * rsqrt), in two passes
        slope = -scale * rsqrt * by_weight
        of_x = affine(wide, slope, -scale * by_bias - slope * mean).addcmul_(gradient, scale[:, None, None])
        return of_x.to(x.dtype), of_weight, of_bias, None, None


def add_up(sums: Tensor, phases: Phases | None) -> None:
    """Over ranks. The time until all have come is no computing: a rank that waits here is not the slow one."""
    if phases:
        phases.end("computing")
    ranks.add_up(sums)  # ranks talk
    if phases:
        phases.end("waiting")


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale * x + shift in one pass: x [m, c, h, w], the others [c]."""
    return torch.addcmul(shift[:, None, None], x, scale[:, None, None])


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """As torch's, with statistics of all ranks' samples: of a micro-batch, where a global batch is cut into some.

    torch's SyncBatchNorm is for GPUs alone. What is usually done without it, statistics of each rank's own samples,
    makes another training of each number of ranks, and another model of each rank.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float
    phases: Phases | None = None  # see `time_waits`

    def __init__(self, channels: int, frozen: bool = False) -> None:
        """``frozen``: by the stored statistics, which stay as they are, also in training."""
        super().__init__(channels)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        """x [m, c, h, w] to the same shape and dtype; m may be 0 on a rank, where another has samples."""
        if self.frozen or not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        y, mean, variance, total = Normalise.apply(x, self.weight, self.bias, self.eps, self.phases)  # type: ignore[no-untyped-call]  # ranks talk, also in backward
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * total / (total - 1).clamp_min(1), self.momentum)  # the unbiased, as torch
        return y  # type: ignore[no-any-return]


def time_waits(model: nn.Module, phases: Phases | None) -> None:
    """Let ``phases``, if any, know when a rank waits for the others' statistics; the compiler knows no clock."""
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm2d):
            module.phases = phases


def make_norm(kind: str, frozen: bool, channels: int) -> nn.Module:
    """``kind`` "batch", or "group": of 8 groups of a sample's channels, which needs no other sample."""
    return GlobalBatchNorm2d(channels, frozen) if kind == "batch" else nn.GroupNorm(8, channels)
