"""Define the models: a small VGG, and torchvision's ResNets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from samestep.options import Options
from torch import Tensor, nn
from vision import models

CLASSES = 10
RESNETS: dict[str, tuple[Any, list[int]]] = {
    "resnet18": (models.resnet.BasicBlock, [2, 2, 2, 2]),
    "resnet50": (models.resnet.Bottleneck, [3, 4, 6, 3]),
}


class FreezableNorms(nn.Module):
    """A module whose `train` keeps batch norms in evaluation mode if ``freeze_bn`` is true.

    Frozen batch norms normalize by their stored statistics, and do not update them.
    """

    freeze_bn = False

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.freeze_bn:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self


class VGG(FreezableNorms):
    """Classify images by four convolutions of 3 x 3 and a linear layer (242,474 parameters).

    Pooling comes before normalization and activation, which then process a quarter of the values.
    """

    def __init__(self, dropout: float, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 64, 128, 128):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.MaxPool2d(2), norm(width), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [m, 3, 32, 32] to scores [m, 10]."""
        x = self.features(images).mean((2, 3))
        return self.fc(self.dropout(x))  # type: ignore[no-any-return]


class ResNet(FreezableNorms, models.ResNet):  # type: ignore[misc]  # mypy runs without torchvision
    """Map images [m, 3, 32, 32] to scores [m, 10] by torchvision's ResNet, with a dropout before its last layer.

    The first layers (``stem``) keep the size of 32 x 32 images ("cifar"), or reduce it to 8 x 8 ("imagenet").
    """

    def __init__(self, name: str, stem: str, dropout: float, norm: Callable[[int], nn.Module]) -> None:
        block, layers = RESNETS[name]
        super().__init__(block, layers, num_classes=CLASSES, norm_layer=norm)
        self.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout))
        if stem == "cifar":
            self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision
            self.maxpool = nn.Identity()


def make_norm(kind: str, channels: int) -> nn.Module:
    """Return a normalization layer: BatchNorm2d for ``kind`` "batch", GroupNorm with 8 groups for "group"."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(8, channels)


def build_model(options: Options, dtype: torch.dtype) -> nn.Module:
    """Return the model with initial weights drawn from --seed.

    The weights are drawn in float32 for any ``dtype``, so that a float64 run starts from the same weights.
    """
    torch.manual_seed(options.seed)
    norm = partial(make_norm, options.norm)
    if options.model == "small":
        model: FreezableNorms = VGG(options.dropout, norm)
    else:
        model = ResNet(options.model, options.stem, options.dropout, norm=norm)
    model.freeze_bn = options.freeze_bn
    model.to(dtype)
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)  # the memory format of the images
    return model.train()
