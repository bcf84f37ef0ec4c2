"""Normalize batches over the global batch: the same statistics at any number of ranks, on any device.

With virtual ranks, each sub-shard has its own statistics ("ghost batch normalization": Hoffer, Hubara & Soudry, "Train
longer, generalize better", NeurIPS 2017), because a rank computes its sub-shards in turn.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm

from samestep.step_timer import COMMUNICATION, COMPUTE, StepTimer
from samestep.torch.ranks import Group, all_reduce
from samestep.torch.samplers import HasRows


class Normalize(torch.autograd.Function):
    """Normalize x [m, c, ...] by mean and variance over all ranks' rows; return those and the number of values too.

    The backward pass is written out: autograd's own would read the activations about twice as often.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        timer: StepTimer | None,
        alone: bool,
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalized x, the mean and the variance of each channel, [channels], and their number of values.

        Args:
            ctx: autograd's context.
            x: the input, [rows, channels, ...].
            weight: the scale, [channels], or None.
            bias: the shift, [channels], or None.
            eps: added to the variance.
            timer: gets the seconds of the all-reduce as communication.
            alone: whether the batch of one rank is the global batch, so that nothing is reduced.
            group: process group to reduce over.
        """
        wide = x if x.dtype == torch.float64 else x.float()  # under autocast x is bfloat16
        dims = dims_of_channel(x)
        # Ranks may differ in their number of rows, so they reduce sums and counts. A variance is a small difference of
        # two sums: squares are taken from the rank's own mean, and reduced in float64.
        n = x.numel() // x.shape[1]
        own = wide.sum(dims) / max(1, n)
        squares = (wide - per_channel(own, x)).square_().sum(dims).double()
        own = own.double()
        sums = torch.cat([n * own, squares + n * own.square(), torch.full_like(own[:1], n)])
        if not alone:
            timed_all_reduce(sums, timer, group)  # collective
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = (square - mean.square()).clamp_min(0).to(wide.dtype)  # rounding may leave it below
        mean, total = mean.to(wide.dtype), sums[-1].to(wide.dtype)
        rsqrt = torch.rsqrt(variance + eps)
        scale = rsqrt if weight is None else weight * rsqrt
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.timer, ctx.alone, ctx.group = timer, alone, group
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None
        ctx.save_for_backward(x, mean, rsqrt, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return affine(wide, scale, shift), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *of_statistics: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias. The last two cover this rank's rows only: DDP reduces them.

        Args:
            ctx: autograd's context.
            gradient: the gradient of the output, of its shape.
            of_statistics: gradients of the other outputs, which have none.
        """
        x, mean, rsqrt, scale, total = ctx.saved_tensors
        wide = x.to(mean.dtype)
        dims = dims_of_channel(x)
        of_bias = gradient.sum(dims)
        of_weight = ((gradient * wide).sum(dims) - mean * of_bias) * rsqrt
        # Every rank's loss depends on this rank's x through the statistics, hence the sum over ranks.
        sums = torch.cat([of_weight, of_bias])
        if not ctx.alone:
            timed_all_reduce(sums, ctx.timer, ctx.group)  # collective
        by_weight, by_bias = (sums / total).chunk(2)
        # scale * (gradient - by_bias - by_weight * (x - mean) * rsqrt), in two passes
        slope = -scale * rsqrt * by_weight
        of_x = affine(wide, slope, -scale * by_bias - slope * mean).addcmul_(gradient, per_channel(scale, x))
        of_affine = of_weight if ctx.has_weight else None, of_bias if ctx.has_bias else None
        return of_x.to(x.dtype), *of_affine, None, None, None, None


def dims_of_channel(x: Tensor) -> list[int]:
    """Return the dimensions of x [m, c, ...] that a channel covers."""
    return [0, *range(2, x.ndim)]


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values`` [c] in a shape that broadcasts with x [m, c, ...]."""
    return values.view(-1, *[1] * (x.ndim - 2))


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale * x + shift in one pass: x [m, c, ...], the others [c].

    Args:
        x: [m, c, ...], float.
        scale: [c], float.
        shift: [c], float.
    """
    return torch.addcmul(per_channel(shift, x), x, per_channel(scale, x))


def timed_all_reduce(sums: Tensor, timer: StepTimer | None, group: Group) -> None:
    """Replace ``sums`` by their sum over ranks.

    Args:
        sums: float64 or float32 [k].
        timer: counts the time as communication, because a rank that waits here is not the slow one.
        group: the ranks that take different data.
    """
    if torch.compiler.is_compiling():  # a compiler cannot trace a timer
        timer = None
    if timer:
        timer.mark(COMPUTE)
    all_reduce(sums, group)  # collective
    if timer:
        timer.mark(COMMUNICATION)


class GlobalBatchNorm(batchnorm._BatchNorm):
    """Normalize like torch's batch norm, with statistics over all ranks' rows.

    A rank may have no rows if another has some. `exact_model.exact` sets the attributes.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    rows: HasRows | None = None
    timer: StepTimer | None = None
    group: Group = None  # the ranks that take different data
    sums: Tensor | None = None  # of a sub-shard, with virtual ranks: n * mean, n * variance and n, [2c + 1]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [m, c, ...] to the same shape and dtype. Collective in training, and so is the backward pass."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        alone = self.sums is not None
        # collective, also in backward
        y, mean, variance, total = Normalize.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self.timer, alone, self.group
        )
        self._check_count(x, total)
        unbiased = variance * total / (total - 1).clamp_min(1)  # as torch's
        if self.sums is None:
            self.update_running(mean, unbiased)
        else:
            torch.cat([total * mean, total * unbiased, total[None]], out=self.sums)
        # Not in Normalize: after a forward pass that ends in a cast, torch 2.11's compiler has wrong gradients.
        return y.to(x.dtype)  # type: ignore[no-any-return]

    def _check_count(self, x: Tensor, total: Tensor) -> None:
        """Raise ValueError, on all ranks alike, if the global batch has 1 value per channel."""
        if torch.compiler.is_compiling():
            return
        is_small = self.rows is None or self.rows.rows().size == 1  # spares a GPU the wait for ``total``
        is_small = is_small and math.prod(x.shape[2:]) == 1
        if is_small and total <= 1:
            raise ValueError(
                "batch norm needs more than 1 value per channel in the global batch: use drop_last=True, or another "
                "batch size"
            )

    @torch.no_grad()
    def update_running(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards a batch's."""
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # the mean over all batches
            pace: Any = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        else:
            pace = self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), pace)
        self.running_var.lerp_(variance.to(self.running_var.dtype), pace)

    def update_from_sums(self) -> None:
        """With virtual ranks: update the running statistics from `sums`, once they cover the global batch."""
        if self.sums is not None:
            mean, variance = (self.sums[:-1] / self.sums[-1]).chunk(2)
            self.update_running(mean, variance)


class GlobalBatchNorm1d(GlobalBatchNorm, nn.BatchNorm1d):
    """`GlobalBatchNorm` for x [m, c] or [m, c, length]."""


class GlobalBatchNorm2d(GlobalBatchNorm, nn.BatchNorm2d):
    """`GlobalBatchNorm` for x [m, c, height, width]."""


class GlobalBatchNorm3d(GlobalBatchNorm, nn.BatchNorm3d):
    """`GlobalBatchNorm` for x [m, c, depth, height, width]."""


class GlobalSyncBatchNorm(GlobalBatchNorm, nn.SyncBatchNorm):
    """`GlobalBatchNorm` in place of torch's SyncBatchNorm."""
