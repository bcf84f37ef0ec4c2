"""Normalize batches with statistics over the global batch, at any world size and on any device.

With virtual ranks, each sub-shard has its own statistics, because a rank computes its sub-shards one after another.
This is "ghost batch normalization" (Hoffer, Hubara & Soudry, "Train longer, generalize better", NeurIPS 2017).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm

from samestep.step_timer import COMMUNICATION, COMPUTE, StepTimer
from samestep.torch.ranks import Group, all_reduce, has_group, place
from samestep.torch.samplers import HasRows

# A framework that does not use torch's process group, such as Horovod, cannot reduce the statistics.
_OTHER_REMEDY = ", freeze the batch norm by eval(), or use GroupNorm"


class Normalize(torch.autograd.Function):
    """Normalize x [m, c, ...] by mean and variance over all ranks' rows.

    The backward pass is explicit, because autograd's backward pass would read the activations about twice as often.
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
        """Normalize x with statistics over all ranks' rows.

        Args:
            ctx: autograd's context.
            x: the input, [m, c, ...].
            weight: the scale, [c], or None.
            bias: the shift, [c], or None.
            eps: number that is added to the variance.
            timer: timer that counts the all-reduce as communication, or None.
            alone: whether to compute statistics without other ranks.
            group: process group to reduce over.

        Returns:
            The normalized x [m, c, ...] in float32 or float64, the means [c], the variances [c], and the number of
            values per channel [].
        """
        wide = x if x.dtype == torch.float64 else x.float()  # with autocast, x may be bfloat16
        dims = dims_of_channel(x)
        # Ranks may have different numbers of rows, so they reduce sums and counts. A variance is a small difference of
        # two large sums. So each rank subtracts its own mean before squaring, and sums are reduced in float64.
        n = x.numel() // x.shape[1]
        own = wide.sum(dims) / max(1, n)
        squares = (wide - per_channel(own, x)).square_().sum(dims).double()
        own = own.double()
        sums = torch.cat([n * own, squares + n * own.square(), torch.full_like(own[:1], n)])
        if not alone:
            timed_all_reduce(sums, timer, group)  # collective
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = (square - mean.square()).clamp_min(0).to(wide.dtype)  # avoids negative values from rounding
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
        """Return the gradients of x, weight and bias, and None for all other inputs.

        The gradients of weight and bias cover only this rank's rows, because DDP reduces them.

        Args:
            ctx: autograd's context.
            gradient: the gradient of the normalized x, [m, c, ...].
            *of_statistics: ignored, because the statistics are not differentiable.

        Raises:
            RuntimeError: autograd records this pass, to differentiate it again.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # backward(create_graph=True)
            raise RuntimeError(
                "the batch norm of exact() has no second derivatives: leave out create_graph=True, or use GroupNorm, "
                "or freeze the batch norm by eval()"
            )
        x, mean, rsqrt, scale, total = ctx.saved_tensors
        wide = x.to(mean.dtype)
        dims = dims_of_channel(x)
        of_bias = gradient.sum(dims)
        of_weight = ((gradient * wide).sum(dims) - mean * of_bias) * rsqrt
        # The losses of all ranks depend on this rank's x through the statistics, so these sums are over all ranks.
        sums = torch.cat([of_weight, of_bias])
        if not ctx.alone:
            timed_all_reduce(sums, ctx.timer, ctx.group)  # collective
        by_weight, by_bias = (sums / total).chunk(2)
        # The gradient of x is scale * (gradient - by_bias - by_weight * (x - mean) * rsqrt), computed in two passes.
        slope = -scale * rsqrt * by_weight
        of_x = affine(wide, slope, -scale * by_bias - slope * mean).addcmul_(gradient, per_channel(scale, x))
        of_affine = of_weight if ctx.has_weight else None, of_bias if ctx.has_bias else None
        return of_x.to(x.dtype), *of_affine, None, None, None, None


def dims_of_channel(x: Tensor) -> list[int]:
    """Return the dimensions of x [m, c, ...] to reduce for statistics per channel: all except the second."""
    return [0, *range(2, x.ndim)]


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values`` [c] with the shape [c, 1, ...], which broadcasts with x [m, c, ...]."""
    return values.view(-1, *[1] * (x.ndim - 2))


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale * x + shift, of the shape of x, in one pass.

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
        timer: timer, or None. The timer counts this call as communication, because a rank that waits here is not a
            straggler.
        group: process group of the ranks that get different data.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace a timer
        timer = None
    if timer:
        timer.mark(COMPUTE)
    all_reduce(sums, group)  # collective
    if timer:
        timer.mark(COMMUNICATION)


class GlobalBatchNorm(batchnorm._BatchNorm):
    """A version of torch's batch norm with statistics over all ranks' rows.

    A rank may have no rows if another rank has rows. `exact_model.exact` sets the attributes.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    rows: HasRows | None = None
    timer: StepTimer | None = None
    group: Group = None  # the ranks that get different data
    sums: Tensor | None = None  # with virtual ranks, [n * mean, n * unbiased variance, n] of a sub-shard, [2c + 1]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [m, c, ...]; keep its shape and dtype.

        In training without virtual ranks, both passes are collectives.
        """
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        alone = self.sums is not None
        if not (alone or torch.compiler.is_compiling() or has_group()):
            place(self.group, _OTHER_REMEDY)  # raises RuntimeError if there are several ranks
        # collective, and so is the backward pass
        y, mean, variance, total = Normalize.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self.timer, alone, self.group
        )
        self._check_count(x, total)
        unbiased = variance * total / (total - 1).clamp_min(1)  # as in torch
        if self.sums is None:
            self.update_running(mean, unbiased)
        else:
            torch.cat([total * mean, total * unbiased, total[None]], out=self.sums)
        # The cast is not in Normalize, because torch 2.11's compiler would then compute wrong gradients.
        return y.to(x.dtype)  # type: ignore[no-any-return]

    def _check_count(self, x: Tensor, total: Tensor) -> None:
        """Raise ValueError on all ranks if the global batch or micro-batch has only 1 value per channel."""
        if torch.compiler.is_compiling() or math.prod(x.shape[2:]) > 1:
            return
        # Reading ``total`` would wait for the GPU in each step.
        most_micro_batches = getattr(self.rows, "accumulate", 1) if self.sums is None else 1
        is_small = self.rows is None or self.rows.rows().size < 2 * most_micro_batches
        if is_small and total <= 1:
            where = "micro-batch" if most_micro_batches > 1 else "global batch"
            raise ValueError(
                f"batch norm needs more than 1 value per channel in the {where}: use drop_last=True, or another batch "
                "size"
            )

    @torch.no_grad()
    def update_running(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics with a batch's mean [c] and variance [c]."""
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # running statistics are means over all batches
            pace: Any = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        else:
            pace = self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), pace)
        self.running_var.lerp_(variance.to(self.running_var.dtype), pace)

    def update_from_sums(self) -> None:
        """Update the running statistics from ``sums``, which must contain the sums over the global batch."""
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
    """The `GlobalBatchNorm` that replaces torch's SyncBatchNorm."""
