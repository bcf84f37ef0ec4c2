"""Define the arguments, the model, the dataset and the records that the two loops in this folder share."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from common import torchvision_that_imports
from samestep.data import datasets
from torch import Tensor, nn
from torch.utils.data import Dataset

torchvision_that_imports()
from PIL import Image  # noqa: E402
from torchvision import transforms  # noqa: E402

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)  # standard deviations of CIFAR-10's channels, as in cifar_ddp


def arguments() -> argparse.Namespace:
    """Parse the options that same_step_elsewhere.py passes to each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of an update, over all ranks")
    parser.add_argument("--accumulate", type=int, required=True, help="micro-batches of an update")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder in which each rank writes what it did")
    parser.add_argument("--switches", action="store_true", help="those by which the library comes closer to one rank")
    parser.add_argument("--plain", action="store_true", help="no batch normalisation, no dropout, no augmentation")
    return parser.parse_args()


class Net(nn.Module):
    """A copy of cifar_ddp's small VGG that does not need samestep. cifar_ddp can load the copy's weights by name."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 64, 128, 128):
            norm = nn.GroupNorm(8, width) if plain else nn.BatchNorm2d(width)
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.MaxPool2d(2), norm, nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.0 if plain else 0.1)  # this layer has no parameters
        self.fc = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores [m, 10] of images [m, 3, 32, 32]."""
        return self.fc(self.dropout(self.features(images).mean((2, 3))))  # type: ignore[no-any-return]


class Cifar(Dataset[tuple[Tensor, int, int]]):
    """A dataset of (image float64 [3, 32, 32], label, index). torchvision's transforms make each image.

    The index serves only to record the samples of an update.
    """

    def __init__(self, train: bool, augment: bool) -> None:
        found = datasets.load("synthetic-cifar10", Path("data"))
        self.images = found.train_images if train else found.test_images
        self.labels = found.train_labels if train else found.test_labels
        drawn = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if augment else []
        fixed = [transforms.ToTensor(), transforms.Normalize(MEAN, STD), transforms.ConvertImageDtype(torch.float64)]
        self.transform = transforms.Compose([*drawn, *fixed])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index]), index


class Record:
    """Record the samples and the loss of each micro-batch of one rank."""

    def __init__(self) -> None:
        self._trained: list[dict[str, Any]] = []

    def add(self, update: int, indices: Tensor, loss: Tensor, lr: float) -> None:
        """Record a micro-batch.

        Args:
            update: number of the update, from 0.
            indices: indices [m] of the samples in the dataset, int64.
            loss: mean loss of the samples, a scalar.
            lr: learning rate of the update.
        """
        assert math.isfinite(loss.item())
        self._trained.append({"update": update, "indices": indices.tolist(), "loss": loss.item(), "lr": lr})

    def write(self, folder: Path, rank: int, accuracy: float, examples: int) -> None:
        """Write the record and the results of a rank.

        Args:
            folder: existing folder for the file rank-``rank``.json.
            rank: number of the rank, from 0.
            accuracy: the test accuracy that the program reports.
            examples: number of test examples that the accuracy counts, over all ranks.
        """
        record = {"trained": self._trained, "accuracy": accuracy, "examples": examples}
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))
