"""Load examples by torchvision's MNIST and its transforms (--input torchvision), as most tutorials do.

The published wheel of torchvision for x86-64 needs a CUDA build of torch. A CPU build does not register the wheel's
operators, so the import fails. This file then declares the operators that the import needs. The app does not call
these operators.
"""

from __future__ import annotations

import torch
from data import Split
from options import TORCHVISION
from samestep import ConfigError
from samestep.data.datasets import MEAN, STD
from torch import Tensor
from torch.utils.data import Dataset


def mnist(split: Split) -> Dataset[tuple[Tensor, int]]:
    """Return torchvision's MNIST dataset with the images and labels of ``split``.

    The function skips the constructor of torchvision's MNIST, which reads only uncompressed files from one folder.
    `samestep.data.datasets` also reads .gz files, searches more folders, verifies the files, and provides mnist-5k.

    Raises:
        ConfigError: torchvision is not installed.
    """
    try:
        try:
            from torchvision import datasets, transforms
        except RuntimeError:  # "operator torchvision::nms does not exist"
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            from torchvision import datasets, transforms
    except ModuleNotFoundError as error:
        raise ConfigError(f"--input torchvision: {error}: `python -m pip install {TORCHVISION}` beside torch") from None
    to_tensor = [transforms.PILToTensor(), transforms.ConvertImageDtype(split.dtype)]  # ToTensor, for any dtype
    transform = transforms.Compose([*to_tensor, transforms.Normalize((MEAN,), (STD,))])
    found: Dataset[tuple[Tensor, int]] = datasets.MNIST.__new__(datasets.MNIST)
    datasets.VisionDataset.__init__(found, transform=transform)
    found.data = split.images.squeeze(1).cpu()  # type: ignore[attr-defined]
    found.targets = split.labels.cpu()  # type: ignore[attr-defined]
    return found


def choose_input(source: str, split: Split) -> Dataset[tuple[Tensor, Tensor]] | Dataset[tuple[Tensor, int]]:
    """Return the training dataset: ``split``, or torchvision's MNIST if --input (``source``) is "torchvision"."""
    if source == "torchvision":
        return mnist(split)
    return split
