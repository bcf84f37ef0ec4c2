"""Compute the exponential moving average of a model's weights (--ema)."""

from __future__ import annotations

import copy

import torch
from samestep.checkpoint import Arrays
from samestep.run import Groups
from samestep.torch import weights
from torch import nn
from torch.optim import Optimizer


class Average:
    """Keep an exponential moving average of a model's weights and running statistics.

    The attribute ``model`` is a copy of the model that contains the average.

    Update ``step`` (from 0) moves the average towards the weights by the fraction
    1 - min(decay, (step + 1) / (step + 10)). This fraction is larger in early updates, so the initial weights soon lose
    their influence. A checkpoint stores only the average, because the fraction depends only on the step.
    Source: TensorFlow's ExponentialMovingAverage with ``num_updates``.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        pace = 1 - min(self._decay, (step + 1) / (step + 10))
        for averaged, current in zip(self.model.state_dict().values(), model.state_dict().values()):
            if averaged.is_floating_point():
                averaged.lerp_(current, pace)
            else:
                averaged.copy_(current)  # an integer, such as BatchNorm2d.num_batches_tracked


def groups(model: nn.Module, optimizer: Optimizer, average: Average | None) -> dict[str, Arrays]:
    """Return the arrays of a checkpoint, with the groups "model", "optimizer", and "ema" if ``average`` is given."""
    found = dict(weights.groups(model, optimizer))
    if average:
        found["ema"] = weights.model_arrays(average.model)
    return found


def load(model: nn.Module, optimizer: Optimizer, average: Average | None, groups: Groups) -> None:
    """Load a checkpoint, which must have the group "model". Without "ema", the average starts at the model's weights.

    Raises:
        ValueError: an array does not fit the model or the optimizer.
    """
    weights.load(model, optimizer, groups)
    if average:
        weights.load_model(average.model, groups.get("ema", groups["model"]))
