"""The moving average of a model's weights, which --ema evaluates, as part of what a checkpoint holds."""

from __future__ import annotations

import copy

import torch
import weights
from samestep.checkpoint import Arrays
from samestep.run import Groups
from torch import nn
from torch.optim import Optimizer


class Average:
    """An exponential moving average of weights and running statistics, in ``model``, a model of its own.

    After update ``step``, from 0, it moves by 1 - min(decay, (step + 1) / (step + 10)) towards the weights: faster at
    first, so that the initial weights are soon forgotten. Source: TensorFlow's ExponentialMovingAverage with
    ``num_updates``. The step is all that decides it, so that nothing but the average is to be saved.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        pace = 1 - min(self._decay, (step + 1) / (step + 10))
        for mine, theirs in zip(self.model.state_dict().values(), model.state_dict().values()):
            mine.lerp_(theirs, pace) if mine.is_floating_point() else mine.copy_(theirs)  # counts of batches


def groups(model: nn.Module, optimizer: Optimizer, average: Average | None) -> dict[str, Arrays]:
    """What a checkpoint holds: as `weights.groups`, and the average."""
    averaged = {"ema": weights.model_arrays(average.model)} if average else {}
    return {**weights.groups(model, optimizer), **averaged}


def load(model: nn.Module, optimizer: Optimizer, average: Average | None, groups: Groups) -> None:
    """The reverse of `groups`; also of weights alone, which the average then starts from. Raises ValueError."""
    weights.load(model, optimizer, groups)
    if average:
        weights.load_model(average.model, groups.get("ema", groups["model"]))
