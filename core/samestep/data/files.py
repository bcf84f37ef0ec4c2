"""Name the files of each dataset, find those that a folder lacks, and read one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from samestep import ConfigError


class DatasetInfo(NamedTuple):
    """Where a dataset is. ``name`` is the one that was found, ``folder`` holds its files."""

    name: str
    folder: Path
    notice: str | None = None  # a sentence to show if another dataset than the requested one was found
    fingerprint: str | None = None  # SHA-256 of the content


MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# CIFAR-10's binary version, and how many images each of its files has; the last is the test set.
CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_RECORDS = {"cifar10": (10_000,) * 6, "synthetic-cifar10": (205, 205, 205, 205, 204, 256)}
CIFAR_SIDE = 32  # pixels


def names(dataset: str) -> tuple[str, ...]:
    """Return the names of a dataset's files, without .gz."""
    return CIFAR_FILES if dataset in CIFAR_RECORDS else MNIST_FILES


def missing(folder: Path, dataset: str) -> list[str]:
    """Return the files that ``folder`` lacks, plain and as .gz; all of them if there is no such folder.

    Raises ConfigError if the folder cannot be read.
    """
    try:
        present = os.listdir(folder)
    except FileNotFoundError:
        present = []
    except OSError as error:
        remedy = "make it a readable folder, or move it away"
        raise ConfigError(f"cannot look into {folder}: {error.strerror}; {remedy}") from None
    packed = "" if dataset in CIFAR_RECORDS else ".gz"
    return [file for file in names(dataset) if file not in present and f"{file}{packed}" not in present]


def read(path: Path) -> bytes:
    """Return a file's content. Raises ConfigError, with the file's name, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; put a good file in its place") from None


def damaged(path: Path, trouble: str) -> ConfigError:
    """Return the error for a damaged file."""
    return ConfigError(f"{path} is damaged ({trouble}); delete it or put a good one in its place")


def check_size(path: Path, excess: int, expected: str) -> None:
    """Raise ConfigError if a file has ``excess`` bytes more than ``expected``; a negative number: fewer."""
    if excess:
        trouble = f"truncated, {-excess} bytes are missing" if excess < 0 else f"{excess} bytes too many"
        raise damaged(path, f"{trouble} for {expected}")
