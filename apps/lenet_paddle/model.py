"""The model, LeNet as Paddle ships it: 61,610 parameters."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.vision.models import LeNet


def build_model(dtype: str, seed: int) -> nn.Layer:
    """Images [m, 1, 28, 28] to scores [m, 10], with the initial weights that ``seed`` decides.

    They are drawn in float32 whatever ``dtype`` is, so that a float64 run starts from the same weights. From here on
    ``dtype`` is Paddle's default: it is also that of an optimizer's learning rate.
    """
    paddle.seed(seed)
    model = LeNet().to(dtype=dtype)
    paddle.set_default_dtype(dtype)
    return model
