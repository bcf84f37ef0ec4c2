"""Define the model: the CNN of many MNIST examples, as mnist_ddp trains it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samestep.sharding import BatchSlice
from torch import Tensor, nn


def channel_dropout(x: Tensor, p: float, rows: BatchSlice) -> Tensor:
    """Set channels of x [m, c, ...] to zero with probability ``p`` and scale the others by 1 / (1 - p).

    Every rank draws for the whole global batch, from a generator that all have seeded alike, and takes its own rows.
    The result does not depend on the number of ranks. torch's own dropout draws for the rank's shard alone.
    """
    drawn = torch.rand(rows.global_size, x.shape[1], device=x.device)
    own = drawn[rows.first : rows.first + len(x)]
    scale = (own >= p).to(x.dtype) / (1 - p)
    while scale.dim() < x.dim():
        scale = scale.unsqueeze(-1)
    return x * scale


class Net(nn.Module):
    """Two convolutions and two linear layers: 21,840 parameters."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor, rows: BatchSlice) -> Tensor:
        """Images [m, 1, 28, 28], ``rows`` of a global batch, to log-probabilities [m, 10]."""
        x = self.conv1(images)
        x = F.relu(F.max_pool2d(x, 2))
        x = self.drop(self.conv2(x), rows)
        x = F.relu(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(self.drop(x, rows))
        return F.log_softmax(x, dim=1)

    def drop(self, x: Tensor, rows: BatchSlice) -> Tensor:
        """Return ``x`` after dropout of its channels in training, and ``x`` itself in an evaluation."""
        if not self.training or not self.dropout:
            return x
        return channel_dropout(x, self.dropout, rows)


def build_model(dropout: float, dtype: torch.dtype, seed: int) -> Net:
    """Return the model with the initial weights that ``seed`` decides, drawn in float32 whatever ``dtype`` is."""
    torch.manual_seed(seed)
    return Net(dropout).to(dtype)
