"""Keep the moving average of a model's weights, which --ema evaluates and checkpoints hold."""

from __future__ import annotations

import copy

import torch
from samestep.checkpoint import Arrays
from samestep.run import Groups
from samestep.torch import weights
from torch import nn
from torch.optim import Optimizer


class Average:
    """Average weights and running statistics exponentially in ``model``, a copy.

    After update ``step``, from 0, it moves by 1 - min(decay, (step + 1) / (step + 10)) towards the weights. It
    moves faster at first, to forget the initial weights soon. Source: TensorFlow's ExponentialMovingAverage with
    ``num_updates``. The step alone decides it, so checkpoints need only the average.
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
                averaged.copy_(current)  # a count


def groups(model: nn.Module, optimizer: Optimizer, average: Average | None) -> dict[str, Arrays]:
    """Return what a checkpoint holds: as `weights.groups`, and the average."""
    found = dict(weights.groups(model, optimizer))
    if average:
        found["ema"] = weights.model_arrays(average.model)
    return found


def load(model: nn.Module, optimizer: Optimizer, average: Average | None, groups: Groups) -> None:
    """Load what `groups` returned, or weights alone, from which the average then starts. Raises ValueError."""
    weights.load(model, optimizer, groups)
    if average:
        weights.load_model(average.model, groups.get("ema", groups["model"]))
