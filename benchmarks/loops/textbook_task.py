"""Define the tasks of the torch loops as in tutorials, with datasets that load one sample at a time.

A task has the layers, the loss and the optimizer of an app with its default options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from samestep.data import datasets
from textbook_net import TextbookNet, TextbookVGG
from torch import Tensor, nn
from torch.utils.data import Dataset

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        images: function that returns the training set in a data folder.
        model: function that returns a new model.
        optimizer: function that returns an optimizer of the given parameters.
        loss: function that returns the mean loss of a model's outputs and the labels.
    """

    images: Callable[[Path], Dataset[Any]]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]


class Cifar(Dataset[tuple[Any, int]]):
    """A dataset with the items of torchvision's CIFAR10 (transformed PIL images), which needs no pickle files."""

    def __init__(self, folder: Path) -> None:
        common.torchvision_that_imports()
        from PIL import Image
        from torchvision import transforms

        found = datasets.load("cifar10", folder)
        self.images = found.train_images
        self.labels = found.train_labels
        self._open = Image.fromarray
        drawn = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        self._transform = transforms.Compose(
            [*drawn, transforms.ToTensor(), transforms.Normalize(CIFAR_MEAN, CIFAR_STD)]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._open(self.images[index])), int(self.labels[index])


TASKS = {
    "mnist": Task(
        common.textbook_images,
        TextbookNet,
        partial(torch.optim.SGD, lr=0.03, momentum=0.9),
        F.nll_loss,
    ),
    "cifar10": Task(
        Cifar,
        partial(TextbookVGG, dropout=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        partial(F.cross_entropy, label_smoothing=0.1),
    ),
}
