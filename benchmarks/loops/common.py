"""Define the arguments and the clock that the loops in this folder share."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

RESIDENT = 32  # number of batches that the loop of a compute limit loads before the clock starts, and then repeats


def arguments() -> argparse.Namespace:
    """Parse the options that throughput.py passes to each rank of a loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help="the contestant")
    parser.add_argument("--task", choices=("mnist", "cifar10"), default="mnist", help="of the torch loops")
    parser.add_argument("--data", type=Path, required=True, help="holds MNIST/raw and cifar-10-batches-bin")
    parser.add_argument("--batch", type=int, required=True, help="samples a step, over all ranks")
    parser.add_argument("--warm-up", type=int, required=True, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed")
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of mnist_ddp's loops, one rank on cuda"
    )
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes samples per second")
    return parser.parse_args()


class Clock:
    """Count and time a loop's steps. After the last timed step, rank 0 writes the samples per second."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options = options
        self.rank = rank
        self.done = 0
        self.begun = 0.0
        self.over = False

    def step(self) -> bool:
        """Count a finished step, and return whether it was the last step."""
        self.done += 1
        last = self.options.warm_up + self.options.steps
        if self.options.device == "cuda" and self.done in (self.options.warm_up, last):
            _synchronize()
        if self.done == self.options.warm_up:
            self.begun = time.perf_counter()
        if self.done < last:
            return False
        if self.rank == 0:
            seconds = time.perf_counter() - self.begun
            speed = self.options.steps * self.options.batch / seconds
            partial = self.options.out.with_suffix(".part")
            partial.write_text(json.dumps(speed))
            os.replace(partial, self.options.out)
        self.over = True
        return True


def _synchronize() -> None:
    """Wait until the GPU has finished all queued work."""
    import torch

    torch.cuda.synchronize()


@functools.cache  # the operators stay declared as long as the library object exists
def torchvision_that_imports() -> object:
    """Make torchvision importable, even if it is built for a CUDA torch and installed beside a CPU torch.

    The import of such a torchvision fails, because its operators are not registered. Its models and datasets work if
    two of the operators are declared.

    Returns:
        The module torchvision, or an object that keeps the operators declared if the import fails, or None if
        torchvision is not installed.
    """
    import torch

    try:
        import torchvision
    except ModuleNotFoundError:
        return None
    except RuntimeError:  # operator torchvision::nms does not exist
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return torchvision


def textbook_images(folder: Path) -> Any:
    """Return torchvision's MNIST training set with the transforms that tutorials use."""
    torchvision_that_imports()
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return datasets.MNIST(str(folder), train=True, transform=transform)
