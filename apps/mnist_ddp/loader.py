"""Load batches as most tutorials do, with --input torchvision: torchvision's MNIST, its transforms, and a DataLoader.

The published wheel of torchvision for x86-64 is built for a CUDA torch. With a CPU torch its compiled operators are not
registered, and the import fails at the first operator that it names. A declaration is enough: no operator is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from data import Split
from numpy.typing import NDArray
from options import TORCHVISION
from samestep import ConfigError
from samestep.data.datasets import MEAN, STD
from samestep.sharding import GlobalBatches
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


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
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    found: Dataset[tuple[Tensor, int]] = datasets.MNIST.__new__(datasets.MNIST)
    datasets.VisionDataset.__init__(found, transform=transform)
    found.data, found.targets = split.images.squeeze(1).cpu(), split.labels.cpu()  # type: ignore[attr-defined]
    return found


class GlobalBatchSampler(Sampler[list[int]]):
    """Yield the indices of this rank's samples for each step: use it where a tutorial has DistributedSampler."""

    def __init__(self, batches: GlobalBatches, steps: range) -> None:
        self._batches, self._steps = batches, steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            for micro_batch in self._batches.micro_batches(step):
                indices = self._batches.indices(step, micro_batch)
                if len(indices):  # a DataLoader cannot return a batch without samples
                    yield indices.tolist()


@dataclass(frozen=True)
class LoaderSplit(Split):
    """A training set whose batches come from a DataLoader, in the sampler's order."""

    loader: Iterator[tuple[Tensor, Tensor]]

    def batch(self, indices: NDArray[np.int64], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the loader's next batch: the samples ``indices``, because sampler and caller take the same steps."""
        if not len(indices):
            return super().batch(indices, dtype)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # ToTensor converts to it
        try:
            images, labels = next(self.loader)
        finally:
            torch.set_default_dtype(default)
        return images.to(self.labels.device), labels.to(self.labels.device)


def choose_input(source: str, training: Split, batches: GlobalBatches, steps: range) -> Split:
    """Return the training set whose batches of ``steps`` come from --input ``source``.

    The DataLoader loads in this process, as it does in most tutorials.
    """
    if source == "memory":
        return training
    loader = DataLoader(mnist(training), batch_sampler=GlobalBatchSampler(batches, steps))
    return LoaderSplit(training.images, training.labels, iter(loader))
