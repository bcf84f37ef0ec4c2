"""Take means and sums over all ranks' samples or tokens, with the gradient that DDP expects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samestep.torch.ranks import GroupOrAxis, all_reduce, collective_device, place, process_group


class _WithGradient(torch.autograd.Function):
    """Return ``value``; its gradient with respect to ``loss`` is ``slope``."""

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
        loss: scalar tensor that has a gradient.
        value: scalar tensor, the value of the result.
        slope: derivative of the result by ``loss``.
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
    """Return the mean over all ranks: the sum of their ``loss_sum`` over the sum of their ``weight_sum``.

    All ranks get the same value, which can be logged. The gradient is this rank's part of the mean's, times the number
    of ranks, because DDP and FSDP divide by it. A mean that is passed as ``loss_sum`` cannot be recognized.

    If gradients of several micro-batches add up to a step, pass the weight of the whole step as ``of``:
    ``of = global_sum(mask.sum())[0]``. The values of the micro-batches then add up to the step's mean.

    Args:
        loss_sum: a loss with ``reduction="sum"``, or a sum of masked or weighted losses; a tensor without dimensions.
        weight_sum: number of samples, number of tokens that count, or sum of weights. It may be 0. If it is 0 on all
            ranks, the result and its gradient are 0.
        of: the sum of weights over all ranks and micro-batches of the step, in place of ``weight_sum``.
        grad_scale: factor in place of the number of ranks: 1 if gradients are summed over ranks.
        group: the ranks that take different data: a process group, or an axis of a device mesh. By default all ranks.

    Raises:
        ValueError: an argument has dimensions, both or neither of ``weight_sum`` and ``of`` are given, or ``group`` is
            a mesh of several axes.
    """
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
    """Return the sum of each value over all ranks, for example of correct predictions and of examples.

    Args:
        values: numbers, or tensors without dimensions; the same number of them on all ranks.
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
    """Raise ValueError if a tensor has dimensions."""
    if isinstance(value, Tensor) and value.ndim:
        raise ValueError(f"{name} has shape {list(value.shape)}: pass its sum")
