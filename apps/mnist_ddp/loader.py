"""Load examples as most tutorials do, with --input torchvision: torchvision's MNIST and its transforms.

The published wheel of torchvision for x86-64 is built for a CUDA torch. With a CPU torch its compiled operators are not
registered, and the import fails at the first operator that it names. A declaration is enough: no operator is called.
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
    """Return torchvision's MNIST with the images and labels of ``split``.

    Its own constructor looks for four uncompressed files in one place. `samestep.data.datasets` also finds .gz files
    and other places, verifies what it finds, and has mnist-5k. Raises ConfigError without torchvision.
    """
    try:
        try:
            from torchvision import datasets, transforms
        except RuntimeError:  # operator torchvision::nms does not exist
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            from torchvision import datasets, transforms
    except ModuleNotFoundError as error:
        raise ConfigError(f"--input torchvision: {error}: `python -m pip install {TORCHVISION}` beside torch") from None
    to_tensor = [transforms.PILToTensor(), transforms.ConvertImageDtype(split.dtype)]  # ToTensor, in any dtype
    transform = transforms.Compose([*to_tensor, transforms.Normalize((MEAN,), (STD,))])
    found: Dataset[tuple[Tensor, int]] = datasets.MNIST.__new__(datasets.MNIST)
    datasets.VisionDataset.__init__(found, transform=transform)
    found.data = split.images.squeeze(1).cpu()  # type: ignore[attr-defined]
    found.targets = split.labels.cpu()  # type: ignore[attr-defined]
    return found


def choose_input(source: str, split: Split) -> Dataset[tuple[Tensor, Tensor]] | Dataset[tuple[Tensor, int]]:
    """Return the dataset of --input ``source``: the split itself, or torchvision's MNIST."""
    if source == "torchvision":
        return mnist(split)
    return split
