"""Define the losses, and torchvision's ResNet v1.5, in which a bottleneck's 3x3 convolution has the stride."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from samestep import ConfigError

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout, mint.nn.Dropout2d)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, pad_mode="pad", padding=size // 2, has_bias=False)


class Block(nn.Cell):  # type: ignore[misc]
    """A residual block: the input plus the output of ``convolutions`` (size, outputs, stride) with batch norms."""

    def __init__(self, inputs: int, convolutions: Sequence[tuple[int, int, int]], statistics: bool | None) -> None:
        super().__init__()
        self.count = len(convolutions)
        width = inputs
        for i, (size, outputs, stride) in enumerate(convolutions, 1):
            setattr(self, f"conv{i}", convolution(width, outputs, size, stride))
            setattr(self, f"bn{i}", nn.BatchNorm2d(outputs, use_batch_statistics=statistics))
            width = outputs
        self.relu = nn.ReLU()
        self.downsample = None
        stride = math.prod(stride for _, _, stride in convolutions)
        if stride > 1 or inputs != width:
            norm = nn.BatchNorm2d(width, use_batch_statistics=statistics)
            self.downsample = nn.SequentialCell([convolution(inputs, width, 1, stride), norm])

    def construct(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.count == 3:
            out = self.bn3(self.conv3(self.relu(out)))
        if self.downsample is not None:
            x = self.downsample(x)
        return self.relu(out + x)


BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}  # number of blocks in each layer, by depth


class ResNet(nn.Cell):  # type: ignore[misc]
    """Map images [m, 3, s, s] to logits [m, 10]. Depth 18 has 11,181,642 parameters, depth 50 has 23,528,522.

    Depth 10 has one basic block in each layer, and depth 18 has two. Depth 10 therefore compiles in less time.
    """

    def __init__(self, depth: int, freeze_bn: bool) -> None:
        super().__init__()
        statistics = False if freeze_bn else None  # None: batch statistics in training, stored statistics in evaluation
        self.conv1 = convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64, use_batch_statistics=statistics)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, pad_mode="pad", padding=1)
        inputs = 64
        for i, count in enumerate(BLOCKS[depth]):
            width = 64 * 2**i
            blocks = []
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                convolutions = [(3, width, stride), (3, width, 1)]
                if depth >= 50:  # use bottleneck blocks
                    convolutions = [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
                blocks.append(Block(inputs, convolutions, statistics))
                _, inputs, _ = convolutions[-1]
            setattr(self, f"layer{i + 1}", nn.SequentialCell(blocks))
        self.fc = nn.Dense(inputs, 10)
        self.batches_tracked = 0  # torch's num_batches_tracked; frozen batch norms do not count

    def construct(self, images: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        return self.fc(x.mean((2, 3)))


class SoftmaxCrossEntropyExpand(nn.Cell):  # type: ignore[misc]
    """Compute the cross entropy of logits [m, 10] and labels int32 [m], one value per row [m], in small operators.

    Automatic parallelization can split these operators along any axis. The loss uses the logarithm of the sum of
    exponentials, because the logarithm of a quotient may be infinite.
    """

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_sum = ops.log(ops.exp(shifted).sum(-1, keepdims=True))
        wanted = ops.one_hot(labels, 10, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
        return ((log_sum - shifted) * wanted).sum(-1)


def build_loss(name: str) -> nn.Cell:
    """Return the loss that maps logits [m, 10] and labels int32 [m] to one value per row [m]."""
    if name == "expand":
        return SoftmaxCrossEntropyExpand()
    return nn.CrossEntropyLoss(reduction="none")


class Forward(nn.Cell):  # type: ignore[misc]
    """Return the mean of weight * loss over a batch, and add it to the parameter ``total``."""

    def __init__(self, model: ResNet, loss: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.loss = loss
        self.total = Parameter(Tensor(0.0, ms.float32), "total", requires_grad=False)

    def construct(self, images: Tensor, labels: Tensor, sample_weights: Tensor) -> Tensor:
        losses = self.loss(self.model(images), labels)
        mean = (losses * sample_weights).mean()
        ops.assign_add(self.total, mean)
        return mean


def build_model(depth: int, freeze_bn: bool, seed: int) -> ResNet:
    """Return the model with initial weights drawn from ``seed``, with torchvision's distributions.

    Convolutions have normal weights of variance 2 / fan_out. Source: He et al., "Delving deep into rectifiers", ICCV
    2015.
    """
    model = ResNet(depth, freeze_bn)
    random = np.random.default_rng(seed)
    for name, parameter in model.parameters_and_names():
        shape = parameter.shape
        if len(shape) == 4:
            fan_out = shape[0] * shape[2] * shape[3]
            scale = np.float32(math.sqrt(2 / fan_out))
            values = random.standard_normal(shape, np.float32) * scale
            parameter.set_data(Tensor(values))
        elif name.startswith("fc."):
            bound = 1 / math.sqrt(model.fc.in_channels)
            values = random.uniform(-bound, bound, shape).astype(np.float32)
            parameter.set_data(Tensor(values))
    return model


def check_dropout(model: nn.Cell) -> None:
    """Raise ConfigError if a cell drops values at random, because a checkpoint cannot hold MindSpore's generators."""
    for name, cell in model.cells_and_names():
        if not isinstance(cell, DROPOUTS):
            continue
        p = getattr(cell, "prob", 1 - getattr(cell, "keep_prob", 1))
        if getattr(cell, "p", None) is not None:  # nn.Dropout(p=...) ignores its keep_prob
            p = cell.p
        if p > 0:
            raise ConfigError(
                f"the dropout {name} draws masks that neither a resume nor another number of ranks repeats: "
                "set its p to 0, or remove it"
            )
