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
    drawn = torch.rand(rows.global_size, x.shape[1], device=x.device)[rows.first : rows.first + len(x)]
    scale = (drawn >= p).to(x.dtype) / (1 - p)
    return x * scale.reshape(*scale.shape, *[1] * (x.dim() - 2))


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
        p = self.dropout if self.training else 0.0
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = self.conv2(x)
        x = F.relu(F.max_pool2d(channel_dropout(x, p, rows) if p else x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(channel_dropout(x, p, rows) if p else x), dim=1)


def build_model(dropout: float, dtype: torch.dtype, seed: int) -> Net:
    """Return the model with the initial weights that ``seed`` decides, drawn in float32 whatever ``dtype`` is."""
    torch.manual_seed(seed)
    return Net(dropout).to(dtype)
