"""Read CIFAR-10's binary version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep.data import files
from samestep.data.files import CIFAR_FILES, CIFAR_SIDE


def read(path: Path, records: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read one file of CIFAR-10's binary version.

    A record has the image's label in one byte. The red, green and blue planes follow, each 32 x 32 bytes in C order.
    Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".

    Args:
        path: path of the file.
        records: number of images in the file.

    Returns:
        Images, uint8 [records, 32, 32, 3], and labels, uint8 [records].

    Raises:
        ConfigError: the file cannot be read or is damaged; the message has the path.
    """
    size = 1 + 3 * CIFAR_SIDE**2
    with files.opened(path) as file:
        data = files.read_rest(file, path, records * size, f"{records} images")
    rows = np.frombuffer(data, np.uint8).reshape(records, size)
    if rows[:, 0].max() > 9:
        raise files.damaged(path, f"label {rows[:, 0].max()}, expected 0 to 9")
    labels = rows[:, 0].copy()
    planes = rows[:, 1:].reshape(records, 3, CIFAR_SIDE, CIFAR_SIDE)
    images = planes.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def read_files(folder: Path, records: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Read the six files of CIFAR-10.

    Args:
        folder: folder of the files.
        records: number of images in each file.

    Returns:
        Training images, training labels, test images and test labels, with the shapes of `read`.

    Raises:
        ConfigError: a file cannot be read or is damaged.
    """
    images = []
    labels = []
    for file, count in zip(CIFAR_FILES, records):
        file_images, file_labels = read(folder / file, count)
        images.append(file_images)
        labels.append(file_labels)
    train_images = np.concatenate(images[:-1])
    train_labels = np.concatenate(labels[:-1])
    return [train_images, train_labels, images[-1], labels[-1]]
