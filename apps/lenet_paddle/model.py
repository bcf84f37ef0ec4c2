"""Build the model, Paddle's LeNet with 61,610 parameters."""

from __future__ import annotations

import paddle
from paddle import Tensor, nn
from paddle.vision.models import LeNet


def build_model(dtype: str, seed: int) -> nn.Layer:
    """Return a model that maps images [m, 1, 28, 28] to scores [m, 10], with initial weights drawn from ``seed``.

    The weights are drawn in float32 for any ``dtype``, so that a float64 run starts from the same weights. The function
    also sets Paddle's default dtype to ``dtype``, because an optimizer's learning rate has the default dtype.
    """
    paddle.seed(seed)
    model = LeNet().to(dtype=dtype)
    paddle.set_default_dtype(dtype)
    return model


def count_correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the top-1 and top-2 counts, int64 [2], of ``scores`` [m, 10] for ``labels`` int64 [m]."""
    hits = (paddle.topk(scores, 2)[1] == labels.unsqueeze(1)).astype("int64").sum(axis=0)
    return paddle.cumsum(hits)
