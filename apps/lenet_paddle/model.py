"""Build the model: LeNet as Paddle ships it, with 61,610 parameters."""

from __future__ import annotations

import paddle
from paddle import Tensor, nn
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


def count_correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Return how many ``labels`` int64 [m] have the highest of ``scores`` [m, 10], and one of the two highest.

    int64 [2]: the top-1 and the top-2 count.
    """
    hits = (paddle.topk(scores, 2)[1] == labels.unsqueeze(1)).astype("int64").sum(axis=0)
    return paddle.cumsum(hits)
