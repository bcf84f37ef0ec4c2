"""Define the model of mnist_ddp, the CNN of many MNIST tutorials."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samestep.sharding import BatchSlice
from torch import Tensor, nn


def channel_dropout(x: Tensor, p: float, rows: BatchSlice) -> Tensor:
    """Set channels of x [m, c, ...] to zero with probability ``p``, and scale the other channels by 1 / (1 - p).

    Every rank draws masks for the global batch from the same seed, and uses the masks of the rank's rows. The result
    therefore does not depend on the world size. torch's dropout draws masks only for the rank's shard.
    """
    drawn = torch.rand(rows.global_size, x.shape[1], device=x.device)
    own = drawn[rows.first : rows.first + len(x)]
    scale = (own >= p).to(x.dtype) / (1 - p)
    while scale.dim() < x.dim():
        scale = scale.unsqueeze(-1)
    return x * scale


class Net(nn.Module):
    """Classify images by two convolutions and two linear layers (21,840 parameters)."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor, rows: BatchSlice) -> Tensor:
        """Map images [m, 1, 28, 28], which are ``rows`` of a global batch, to log-probabilities [m, 10]."""
        x = self.conv1(images)
        x = F.relu(F.max_pool2d(x, 2))
        x = self.drop(self.conv2(x), rows)
        x = F.relu(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(self.drop(x, rows))
        return F.log_softmax(x, dim=1)

    def drop(self, x: Tensor, rows: BatchSlice) -> Tensor:
        """Return ``x`` after dropout of channels in training, or ``x`` itself in evaluation."""
        if not self.training or not self.dropout:
            return x
        return channel_dropout(x, self.dropout, rows)


def build_model(dropout: float, dtype: torch.dtype, seed: int) -> Net:
    """Return the model in ``dtype``. Its initial weights are drawn in float32, so they depend only on ``seed``."""
    torch.manual_seed(seed)
    return Net(dropout).to(dtype)
