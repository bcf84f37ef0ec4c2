"""Name the files of each dataset, find missing ones, and read one."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from samestep import ConfigError


class DatasetInfo(NamedTuple):
    """A dataset's name and its folder of files."""

    name: str
    folder: Path
    notice: str | None = None  # a warning if this is not the requested dataset
    fingerprint: str | None = None  # SHA-256 of the content


MNIST_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

# CIFAR-10's binary version, and how many images each of its files has; the last is the test set.
CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_RECORDS = {"cifar10": (10_000,) * 6, "synthetic-cifar10": (205, 205, 205, 205, 204, 256)}
CIFAR_SIDE = 32  # pixels


def names(dataset: str) -> tuple[str, ...]:
    """Return the names of a dataset's files, without .gz."""
    return CIFAR_FILES if dataset in CIFAR_RECORDS else MNIST_FILES


def missing(folder: Path, dataset: str) -> list[str]:
    """Return the files that ``folder`` lacks, plain and as .gz; all of them if the folder is missing.

    Raises ConfigError if the folder cannot be read.
    """
    try:
        present = os.listdir(folder)
    except FileNotFoundError:
        present = []
    except OSError as error:
        remedy = "make it a readable folder, or move it away"
        raise ConfigError(f"cannot look into {folder}: {error.strerror}: {remedy}") from None
    packed = "" if dataset in CIFAR_RECORDS else ".gz"
    return [file for file in names(dataset) if file not in present and f"{file}{packed}" not in present]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file to read its content, uncompressed if it is gzipped.

    Raises ConfigError, with the file's name, if it cannot be opened, or read while the context is open.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # without waiting for a FIFO's writer
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "it is not a regular file")
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield gzip.GzipFile(fileobj=file) if is_packed else file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # of the CRC-32 and length, too
        raise damaged(path, f"gzip: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: put a good file in its place") from None


def read_rest(file: IO[bytes], path: Path, size: int, expected: str) -> bytearray:
    """Return the ``size`` bytes that are left in a file of ``path``, and read at most one byte more.

    Raises ConfigError, with ``expected``, which describes them, if there are fewer or more.
    """
    content = bytearray()
    while len(content) <= size and (chunk := file.read(min(2**20, size + 1 - len(content)))):
        content += chunk
    if len(content) != size:
        missing_bytes = f"truncated, {size - len(content)} bytes are missing for"
        trouble = missing_bytes if len(content) < size else "it has more bytes than"
        raise damaged(path, f"{trouble} {expected}")
    return content


def damaged(path: Path, trouble: str) -> ConfigError:
    """Return the error for a damaged file."""
    return ConfigError(f"{path} is damaged ({trouble}): delete it or put a good one in its place")
