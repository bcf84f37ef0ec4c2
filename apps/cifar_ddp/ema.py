"""Compute the exponential moving average of a model's weights (--ema)."""

from __future__ import annotations

import copy

import torch
from samestep.checkpoint import Arrays
from samestep.run import Groups
from samestep.torch import weights
from torch import Tensor, nn
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
        self._saved = set(self.model.state_dict())

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        pace = 1 - min(self._decay, (step + 1) / (step + 10))
        averages = named_tensors(self.model)
        for name, current in named_tensors(model).items():
            if name in self._saved and current.is_floating_point():
                averages[name].lerp_(current, pace)
            else:  # an integer, such as BatchNorm2d.num_batches_tracked, or a buffer that checkpoints do not contain
                averages[name].copy_(current)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers by name. The state_dict would list a weight that two layers share twice."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
