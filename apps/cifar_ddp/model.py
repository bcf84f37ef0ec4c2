"""Define the models: a small VGG, and torchvision's ResNets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from norm import make_norm
from samestep.options import Options
from samestep.sharding import BatchSlice
from torch import Tensor, nn
from vision import models

CLASSES = 10
RESNETS: dict[str, tuple[Any, list[int]]] = {
    "resnet18": (models.resnet.BasicBlock, [2, 2, 2, 2]),
    "resnet50": (models.resnet.Bottleneck, [3, 4, 6, 3]),
}


def channel_dropout(x: Tensor, p: float, rows: BatchSlice) -> Tensor:
    """Set channels of x [m, c, ...] to zero with probability ``p`` and scale the others by 1 / (1 - p).

    Every rank draws for the whole global batch, from generators with the same seed, and takes its own rows. The
    result does not depend on the number of ranks. torch's own dropout draws for the rank's shard only.
    """
    drawn = torch.rand(rows.global_size, x.shape[1], device=x.device)[rows.first : rows.first + len(x)]
    scale = (drawn >= p).to(x.dtype) / (1 - p)
    return x * scale.reshape(*scale.shape, *[1] * (x.dim() - 2))


class VGG(nn.Module):
    """Classify by four convolutions of 3 x 3 and a linear layer: 242,474 parameters.

    Pooling comes before normalization and activation, which then process a quarter of the values.
    """

    def __init__(self, dropout: float, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.dropout = dropout
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 64, 128, 128):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.MaxPool2d(2), norm(width), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor, rows: BatchSlice) -> Tensor:
        """Map images [m, 3, 32, 32], ``rows`` of a global batch, to scores [m, 10]."""
        x = self.features(images).mean((2, 3))
        return self.fc(channel_dropout(x, self.dropout, rows) if self.training and self.dropout else x)  # type: ignore[no-any-return]


class ResNet(models.ResNet):  # type: ignore[misc]  # mypy runs without torchvision
    """Build torchvision's ResNet with its names of parameters.

    ``stem`` "cifar" keeps the size of 32 x 32 images; "imagenet" reduces them to 8 x 8.
    """

    def __init__(self, name: str, stem: str, dropout: float, norm: Callable[[int], nn.Module]) -> None:
        block, layers = RESNETS[name]
        super().__init__(block, layers, num_classes=CLASSES, norm_layer=norm)
        self.dropout = dropout
        if stem == "cifar":
            self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
            self.maxpool = nn.Identity()

    def forward(self, images: Tensor, rows: BatchSlice) -> Tensor:
        """Map images [m, 3, 32, 32], ``rows`` of a global batch, to scores [m, 10]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))
        return self.fc(channel_dropout(x, self.dropout, rows) if self.training and self.dropout else x)  # type: ignore[no-any-return]


def build_model(options: Options, dtype: torch.dtype) -> nn.Module:
    """Return the model with the initial weights that --seed decides.

    They are drawn in float32 for any ``dtype``, so that a float64 run starts from the same weights.
    """
    torch.manual_seed(options.seed)
    norm = partial(make_norm, options.norm, options.freeze_bn)
    if options.model == "small":
        model: nn.Module = VGG(options.dropout, norm)
    else:
        model = ResNet(options.model, options.stem, options.dropout, norm)
    model.to(dtype)
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)  # as the images
    return model


def compile_step(model: nn.Module) -> Any:
    """Return ``model`` with compiled forward and backward passes, for shards of one sample or more.

    Random numbers are torch's, as without a compiler: the compiler's own depend on how it splits the work.
    """
    return torch.compile(model, dynamic=True, options={"fallback_random": True})
