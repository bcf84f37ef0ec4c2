"""CIFAR-10's shape without CIFAR-10: samestep's made-up images, as torchvision's data set gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.data import datasets


class Pictures:
    """1,024 images for training: (what ``transform`` makes of a PIL image, label)."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        found = datasets.resolve("synthetic-cifar10", Path("data"))
        data = datasets.load(found.name, Path("data"))
        self.images, self.labels, self.transform = data.train_images, data.train_labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])
