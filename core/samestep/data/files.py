"""Define the file names of each dataset, find missing files, and read files."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from samestep import ConfigError


class DatasetInfo(NamedTuple):
    """A dataset's name and the folder of its files."""

    name: str
    folder: Path
    notice: str | None = None  # a warning if this dataset replaces the requested one
    fingerprint: str | None = None  # SHA-256 of the dataset's arrays


MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# The files of CIFAR-10's binary version, and the number of images in each. The last file is the test set.
CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_RECORDS = {"cifar10": (10_000,) * 6, "synthetic-cifar10": (205, 205, 205, 205, 204, 256)}
CIFAR_SIDE = 32  # pixels

# Patterns of file names that seem to belong to a dataset. Folders of other datasets may contain the same file names.
LOOKALIKE_DEPTH = 2  # number of nested folders to search
LOOKALIKE_NAMES = 20_000  # maximum number of names to check, because a folder may contain millions of images
_IDX_NAME = r"idx[13]-ubyte|^(train|t10k)-(images|labels)"
_LOOKALIKES = {
    "mnist": re.compile(rf"{_IDX_NAME}|^mnist[-_.]", re.IGNORECASE),
    "fashion-mnist": re.compile(rf"{_IDX_NAME}|^fashion[-_]?mnist[-_.]", re.IGNORECASE),
    "cifar10": re.compile(r"^data_batch_[1-5]|^cifar-?10[-_.]", re.IGNORECASE),
}
_OTHER_DATASETS = {"mnist", "mnist-5k", "fashion-mnist", "fashionmnist", "emnist", "kmnist", "qmnist"}


def names(dataset: str) -> tuple[str, ...]:
    """Return the names of a dataset's files, without .gz."""
    return CIFAR_FILES if dataset in CIFAR_RECORDS else MNIST_FILES


def spellings(file: str) -> list[str]:
    """Return the names that a dataset's file may have, in the order of preference.

    The names of MNIST's files have a hyphen or a dot before ``idx``, and may end in .gz. The torchvision package stores
    both plain and .gz files. Plain files are preferred because they are faster to read.
    """
    if file in CIFAR_FILES:
        return [file]
    dotted = file.replace("-idx", ".idx")
    return [file, f"{file}.gz", dotted, f"{dotted}.gz"]


def path_of(folder: Path, file: str) -> Path:
    """Return the path of a dataset's file in a folder. Kaggle puts each file into a folder with the file's name.

    If the file is missing, the path may be a folder with the file's name.
    """
    found = [folder / name for name in spellings(file) if os.path.exists(folder / name)]
    for path in found:
        if not path.is_dir():
            return path
        for name in spellings(file):
            if (path / name).is_file():
                return path / name
    if found:
        return found[0]
    if file in CIFAR_FILES:
        return folder / file
    return folder / f"{file}.gz"


def present_names(folder: Path) -> list[str]:
    """Return the names in a folder; [] if the folder is missing.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        remedy = "make it a readable folder, or move it away"
        raise ConfigError(f"cannot look into {folder}: {error.strerror}: {remedy}") from None


def missing(folder: Path, dataset: str) -> list[str]:
    """Return the names of the dataset's files that ``folder`` lacks, without .gz.

    A file is present under any of its `spellings`.

    Raises:
        ConfigError: the folder cannot be read.
    """
    present = set(present_names(folder))
    return [file for file in names(dataset) if present.isdisjoint(spellings(file))]


def lookalikes(folder: Path, dataset: str) -> list[str]:
    """Return the paths, relative to ``folder``, of files that seem to belong to a dataset.

    The search covers ``folder`` and two levels below, except folders of other datasets. The search stops after
    LOOKALIKE_NAMES names.
    """
    pattern = _LOOKALIKES[dataset]
    others = _OTHER_DATASETS - {dataset, dataset.replace("-", "")}
    found: list[str] = []
    names_left = LOOKALIKE_NAMES
    for root, folders, file_names in os.walk(folder):
        here = Path(root).relative_to(folder)
        is_deepest = len(here.parts) == LOOKALIKE_DEPTH
        if is_deepest:
            folders.clear()
        folders[:] = sorted(name for name in folders if name.lower() not in others)
        found += [str(here / name) for name in sorted(file_names) if pattern.search(name)]
        names_left -= len(file_names)
        if names_left < 0:
            break
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading. Reads of a gzipped file return decompressed content.

    Raises:
        ConfigError: the file cannot be opened, or a read in the context fails; the message has the path.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # O_NONBLOCK: a FIFO must not block
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "it is not a regular file")
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield gzip.GzipFile(fileobj=file) if is_packed else file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # a damaged file, such as a wrong CRC-32
        raise damaged(path, f"gzip: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: put a good file in its place") from None


def read_rest(file: IO[bytes], path: Path, size: int, expected: str) -> bytearray:
    """Return the rest of a file, which must have ``size`` bytes. Read at most ``size`` + 1 bytes.

    Args:
        file: open file, at the first byte to read.
        path: path of the file, for the error.
        size: expected number of bytes.
        expected: description of the bytes, for the error.

    Raises:
        ConfigError: the rest has fewer or more than ``size`` bytes.
    """
    content = bytearray()
    while len(content) <= size:
        chunk = file.read(min(2**20, size + 1 - len(content)))
        if not chunk:
            break
        content += chunk
    if len(content) < size:
        raise damaged(path, f"truncated, {size - len(content)} bytes are missing for {expected}")
    if len(content) > size:
        raise damaged(path, f"it has more bytes than {expected}")
    return content


def damaged(path: Path, trouble: str) -> ConfigError:
    """Return the error for a damaged file."""
    return ConfigError(f"{path} is damaged ({trouble}): delete it or put a good one in its place")
