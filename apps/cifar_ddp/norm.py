"""Normalize batches over the global batch: the same statistics at any number of ranks, on any device.

With --virtual-ranks each sub-shard has its own statistics ("ghost batch normalization": Hoffer, Hubara & Soudry, "Train
longer, generalize better", NeurIPS 2017), because a rank computes its sub-shards in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from samestep import ConfigError
from samestep.sharding import GlobalBatches
from samestep.step_timer import COMMUNICATION, COMPUTE, StepTimer
from samestep.torch.reduction import ordered_all_reduce
from torch import Tensor, nn


class Normalize(torch.autograd.Function):
    """Normalize x [m, c, h, w] by mean and variance over all ranks' samples; return those and the number of values too.

    The backward pass is written out: autograd's own would read the activations about twice as often.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, timer: StepTimer | None, alone: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()  # under autocast x is bfloat16
        # Ranks may differ in their number of samples, so they reduce sums and counts. A variance is a small difference
        # of two sums: squares are taken from the rank's own mean, and reduced in float64.
        n = x.numel() // x.shape[1]
        own = wide.sum((0, 2, 3)) / max(1, n)
        squares = (wide - own[:, None, None]).square_().sum((0, 2, 3)).double()
        own = own.double()
        sums = torch.cat([n * own, squares + n * own.square(), torch.full_like(own[:1], n)])
        if not alone:
            timed_all_reduce(sums, timer)  # collective
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = (square - mean.square()).clamp_min(0).to(wide.dtype)  # rounding may leave it below
        mean, total = mean.to(wide.dtype), sums[-1].to(wide.dtype)
        rsqrt = torch.rsqrt(variance + eps)
        scale = weight * rsqrt
        ctx.timer, ctx.alone = timer, alone
        ctx.save_for_backward(x, mean, rsqrt, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return affine(wide, scale, bias - mean * scale), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *of_statistics: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias. The last two cover this rank's samples only: DDP reduces them."""
        x, mean, rsqrt, scale, total = ctx.saved_tensors
        wide = x.to(mean.dtype)
        of_bias = gradient.sum((0, 2, 3))
        of_weight = ((gradient * wide).sum((0, 2, 3)) - mean * of_bias) * rsqrt
        # Every rank's loss depends on this rank's x through the statistics, hence the sum over ranks.
        sums = torch.cat([of_weight, of_bias])
        if not ctx.alone:
            timed_all_reduce(sums, ctx.timer)  # collective
        by_weight, by_bias = (sums / total).chunk(2)
        # scale * (gradient - by_bias - by_weight * (x - mean) * rsqrt), in two passes
        slope = -scale * rsqrt * by_weight
        of_x = affine(wide, slope, -scale * by_bias - slope * mean).addcmul_(gradient, scale[:, None, None])
        return of_x.to(x.dtype), of_weight, of_bias, None, None, None


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
    sums: Tensor | None = None  # see `separate`

    def __init__(self, channels: int, frozen: bool = False) -> None:
        """``frozen``: normalize by the stored statistics, also in training, and leave them as they are."""
        super().__init__(channels)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        """Map x [m, c, h, w] to the same shape and dtype; m may be 0 on a rank if another has samples."""
        if self.frozen or not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        settings = self.weight, self.bias, self.eps, self.timer, self.sums is not None
        y, mean, variance, total = Normalize.apply(x, *settings)  # type: ignore[no-untyped-call]  # collective, also in backward
        unbiased = variance * total / (total - 1).clamp_min(1)  # as torch's
        if self.sums is None:
            self.update_running(mean, unbiased)
        else:
            torch.cat([total * mean, total * unbiased, total[None]], out=self.sums)
        # Not in Normalize: after a forward pass that ends in a cast, torch 2.11's compiler has wrong gradients.
        return y.to(x.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update_running(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards a batch's."""
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def time_communication(model: nn.Module, timer: StepTimer | None) -> None:
    """Let ``timer``, if any, measure how long a rank waits for the others' statistics. A compiler cannot trace it."""
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm2d):
            module.timer = timer


def separate(model: nn.Module, batches: GlobalBatches) -> list[Tensor]:
    """Normalize each sub-shard by its own statistics; return the tensors that then hold them, to be summed.

    Each norm's tensor [2c + 1] has n * mean, n * variance and n, the number of values. Raises ConfigError if one of the
    ``batches`` has sub-shards of fewer than 2 samples.
    """
    norms = [module for module in model.modules() if isinstance(module, GlobalBatchNorm2d) and not module.frozen]
    last = batches.steps_per_epoch - 1
    if norms and batches.size(last) < 2 * batches.num_micro_batches(last):
        cut = f"{batches.size(last)} samples of an epoch's last batch make {batches.num_micro_batches(last)} sub-shards"
        remedy = "lower --virtual-ranks or --accumulate, or use --norm group"
        raise ConfigError(f"--virtual-ranks: {cut}, and batch norm needs 2 in each: {remedy}")
    for module in norms:
        module.sums = module.running_mean.new_zeros(2 * module.num_features + 1)
    return [module.sums for module in norms if module.sums is not None]


def update_running(model: nn.Module) -> None:
    """Update the running statistics by the means of all sub-shards' statistics, from the sums over the global batch."""
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm2d) and module.sums is not None:
            module.update_running(*(module.sums[:-1] / module.sums[-1]).chunk(2))


def make_norm(kind: str, frozen: bool, channels: int) -> nn.Module:
    """Return the norm ``kind``: "batch", or "group" (8 groups of a sample's channels, independent of other samples)."""
    return GlobalBatchNorm2d(channels, frozen) if kind == "batch" else nn.GroupNorm(8, channels)
