"""Normalize batches over the global batch: the same statistics at any number of ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from samestep.step_timer import COMMUNICATION, COMPUTE, StepTimer
from samestep.torch.reduction import ordered_all_reduce
from torch import Tensor, nn


class Normalize(torch.autograd.Function):
    """Normalize x [m, c, h, w] by mean and variance over all ranks' samples; return those and the number of values too.

    The backward pass is written out: autograd's own would read the activations about twice as often.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, timer: StepTimer | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()  # under autocast x is bfloat16
        # Ranks may differ in their number of samples, so they reduce sums and counts. A variance is a small difference
        # of two sums: squares are taken from the rank's own mean, and reduced in float64.
        n = x.numel() // x.shape[1]
        own = wide.sum((0, 2, 3)) / max(1, n)
        squares = (wide - own[:, None, None]).square_().sum((0, 2, 3)).double()
        own = own.double()
        sums = torch.cat([n * own, squares + n * own.square(), torch.full_like(own[:1], n)])
        timed_all_reduce(sums, timer)  # collective
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = (square - mean.square()).clamp_min(0).to(wide.dtype)  # rounding may leave it below
        mean, total = mean.to(wide.dtype), sums[-1].to(wide.dtype)
        rsqrt = torch.rsqrt(variance + eps)
        scale = weight * rsqrt
        ctx.timer = timer
        ctx.save_for_backward(x, mean, rsqrt, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return affine(wide, scale, bias - mean * scale).to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *of_statistics: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of x, weight and bias. The last two cover this rank's samples only: DDP reduces them."""
        x, mean, rsqrt, scale, total = ctx.saved_tensors
        wide, gradient = x.to(mean.dtype), gradient.to(mean.dtype)
        of_bias = gradient.sum((0, 2, 3))
        of_weight = ((gradient * wide).sum((0, 2, 3)) - mean * of_bias) * rsqrt
        # Every rank's loss depends on this rank's x through the statistics, hence the sum over ranks.
        sums = torch.cat([of_weight, of_bias])
        timed_all_reduce(sums, ctx.timer)  # collective
        by_weight, by_bias = (sums / total).chunk(2)
        # scale * (gradient - by_bias - by_weight * (x - mean) * rsqrt), in two passes
        slope = -scale * rsqrt * by_weight
        of_x = affine(wide, slope, -scale * by_bias - slope * mean).addcmul_(gradient, scale[:, None, None])
        return of_x.to(x.dtype), of_weight, of_bias, None, None


def timed_all_reduce(sums: Tensor, timer: StepTimer | None) -> None:
    """Sum over ranks; the time counts as communication, because a rank that waits here is not the slow one."""
    if timer:
        timer.mark(COMPUTE)
    ordered_all_reduce(sums)  # collective
    if timer:
        timer.mark(COMMUNICATION)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale * x + shift in one pass: x [m, c, h, w], the others [c]."""
    return torch.addcmul(shift[:, None, None], x, scale[:, None, None])


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Normalize like torch's, with statistics over all ranks' samples of a micro-batch.

    torch's SyncBatchNorm is for GPUs alone. Statistics of each rank's own samples, the usual way without it, make
    training depend on the number of ranks, and models differ between ranks.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float
    timer: StepTimer | None = None  # see `time_communication`

    def __init__(self, channels: int, frozen: bool = False) -> None:
        """``frozen``: normalize by the stored statistics, also in training, and leave them as they are."""
        super().__init__(channels)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        """Map x [m, c, h, w] to the same shape and dtype; m may be 0 on a rank if another has samples."""
        if self.frozen or not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        y, mean, variance, total = Normalize.apply(x, self.weight, self.bias, self.eps, self.timer)  # type: ignore[no-untyped-call]  # collective, also in backward
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * total / (total - 1).clamp_min(1), self.momentum)  # the unbiased, as torch
        return y  # type: ignore[no-any-return]


def time_communication(model: nn.Module, timer: StepTimer | None) -> None:
    """Let ``timer``, if any, measure how long a rank waits for the others' statistics. A compiler cannot trace it."""
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm2d):
            module.timer = timer


def make_norm(kind: str, frozen: bool, channels: int) -> nn.Module:
    """Return the norm ``kind``: "batch", or "group" (8 groups of a sample's channels, independent of other samples)."""
    return GlobalBatchNorm2d(channels, frozen) if kind == "batch" else nn.GroupNorm(8, channels)
