"""Build the model: LeNet as Paddle ships it, with 61,610 parameters."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.vision.models import LeNet


def build_model(dtype: str, seed: int) -> nn.Layer:
    """Return a model of images [m, 1, 28, 28] to scores [m, 10], with the initial weights that ``seed`` decides.

    The weights are drawn in float32 for every ``dtype``, so that a float64 run starts from the same weights. ``dtype``
    becomes Paddle's default, because an optimizer's learning rate takes the default dtype.
    """
    paddle.seed(seed)
    model = LeNet().to(dtype=dtype)
    paddle.set_default_dtype(dtype)
    return model
