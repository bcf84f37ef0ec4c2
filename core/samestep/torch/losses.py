"""Compute means and sums over all ranks' samples or tokens, with the gradient that DDP expects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samestep.torch.ranks import GroupOrAxis, all_reduce, collective_device, place, process_group

in_sub_shards = False  # whether the loop iterates over `GlobalBatchSampler.micro_batches` with virtual ranks


class _WithGradient(torch.autograd.Function):
    """An operation that returns ``value``, with ``slope`` as the gradient with respect to ``loss``."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, slope: Tensor | float) -> Tensor:
        ctx.slope = slope
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient * ctx.slope).to(gradient.dtype), None, None


def with_gradient(loss: Tensor, value: Tensor, slope: Tensor | float) -> Tensor:
    """Return ``value``, with ``slope`` as its gradient with respect to ``loss``.

    Args:
        loss: scalar tensor that requires a gradient.
        value: value of the result, scalar tensor.
        slope: derivative of the result with respect to ``loss``.
    """
    result: Tensor = _WithGradient.apply(loss, value, slope)  # type: ignore[no-untyped-call]
    return result


def global_mean(
    loss_sum: Tensor,
    weight_sum: Tensor | float | None = None,
    *,
    of: Tensor | float | None = None,
    grad_scale: float | None = None,
    group: GroupOrAxis = None,
) -> Tensor:
    """Return the sum of all ranks' ``loss_sum``, divided by the sum of all ranks' ``weight_sum``.

    This call is a collective. The value is the same on all ranks. The gradient is this rank's part of the mean's
    gradient, multiplied by the world size, because DDP and FSDP divide by the world size. Do not pass a mean as
    ``loss_sum``, because this function cannot detect the mistake.

    If a step accumulates gradients of several micro-batches, pass the weight of the complete step as ``of``:
    ``of = global_sum(mask.sum())[0]``. The values of the micro-batches then add up to the step's mean. With virtual
    ranks, call `GlobalBatchSampler.scale` instead.

    Args:
        loss_sum: a loss with ``reduction="sum"``, or a sum of masked or weighted losses; scalar tensor.
        weight_sum: number of samples, number of tokens with a loss, or sum of weights; may be 0. If ``weight_sum`` is
            0 on all ranks, the result and its gradient are 0.
        of: the sum of weights over all ranks and micro-batches of the step, which replaces ``weight_sum``.
        grad_scale: factor of the gradient that replaces the world size. Pass 1 if gradients are summed over ranks.
        group: the ranks that get different data: a process group, or an axis of a device mesh. None means all ranks.

    Raises:
        ValueError: an argument has dimensions, both or neither of ``weight_sum`` and ``of`` are given, or ``group`` is
            a mesh of several axes.
        RuntimeError: the loop iterates over micro-batches with virtual ranks.
    """
    if in_sub_shards:
        raise RuntimeError(
            "global_mean cannot be used for micro-batches of virtual ranks: use sampler.scale(loss_sum, of=...), with "
            "a global_sum of the step's weights"
        )
    check_scalar("loss_sum", loss_sum)
    if (weight_sum is None) == (of is None):
        raise ValueError("global_mean needs either weight_sum or of")
    check_scalar("weight_sum", weight_sum)
    ranks = process_group(group)
    device = loss_sum.device
    own_weight = torch.as_tensor(0.0 if weight_sum is None else weight_sum, dtype=torch.float64, device=device)
    row = torch.stack([loss_sum.detach().double(), own_weight.detach()])
    total_loss, total_weight = all_reduce(row.to(collective_device()), ranks).to(device)  # collective
    if of is not None:
        total_weight = torch.as_tensor(of, dtype=torch.float64, device=device)
    is_weighted = total_weight != 0
    divisor = torch.where(is_weighted, total_weight, 1.0)
    mean = torch.where(is_weighted, total_loss / divisor, 0.0)
    scale = place(ranks).world_size if grad_scale is None else grad_scale
    slope = torch.where(is_weighted, scale / divisor, 0.0)
    return with_gradient(loss_sum, mean.to(loss_sum.dtype), slope=slope)


def global_sum(*values: Tensor | float, group: GroupOrAxis = None) -> list[float]:
    """Return the sum of each value over all ranks. This call is a collective.

    Args:
        *values: numbers or scalar tensors, such as numbers of correct predictions. All ranks must pass the same number
            of values.
        group: as in `global_mean`.

    Raises:
        ValueError: a value has dimensions, or ``group`` is a mesh of several axes.
    """
    for value in values:
        check_scalar("the value", value)
    row = torch.tensor([float(value) for value in values], dtype=torch.float64, device=collective_device())
    sums: list[float] = all_reduce(row, process_group(group)).tolist()  # collective
    return sums


def check_scalar(name: str, value: Tensor | float | None) -> None:
    """Raise ValueError if a value is a tensor with dimensions. ``name`` is its name in the message."""
    if isinstance(value, Tensor) and value.ndim:
        raise ValueError(f"{name} has shape {list(value.shape)}: pass its sum")
