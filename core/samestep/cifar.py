"""CIFAR-10's binary version, for `datasets`, which loads this where such a set is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep import UserError, datasets
from samestep.datasets import CIFAR_FILES, CIFAR_SIDE, Found, damaged


def read(path: Path, records: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read one file of CIFAR-10's binary version.

    Format: one record an image, its label in one byte, then its red, its green and its blue plane, each 32 x 32 in C
    order. Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".

    Returns images uint8 [records, 32, 32, 3], the planes now last, and labels uint8 [records]. Raises UserError, which
    names the file, when it cannot be read or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; put a good file in its place") from None
    size = 1 + 3 * CIFAR_SIDE**2
    if excess := len(data) - records * size:
        trouble = f"truncated, {-excess} bytes are missing" if excess < 0 else f"{excess} bytes too many"
        raise damaged(path, f"{trouble} for {records} images")
    rows = np.frombuffer(data, np.uint8).reshape(records, size)
    if rows[:, 0].max() > 9:
        raise damaged(path, f"label {rows[:, 0].max()}, expected 0 to 9")
    images = rows[:, 1:].reshape(records, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, 0].copy()


def read_files(found: Found) -> list[NDArray[np.uint8]]:
    """Training images, training labels, test images, test labels, as `datasets.Dataset` has them."""
    counts = datasets.CIFAR_RECORDS[found.name]
    files = [read(found.folder / file, records) for file, records in zip(CIFAR_FILES, counts)]
    images, labels = zip(*files[:-1])
    return [np.concatenate(images), np.concatenate(labels), *files[-1]]
