"""Describe a rank's shard of an array, and a stored array that can be read in parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from samestep import NonRetryableError

BLOCK = 16 * 2**20  # maximum bytes to read at a time
Shape = tuple[int, ...]


class TensorShard(NamedTuple):
    """A rank's part of an array.

    Attributes:
        values: the part, which may be empty.
        offset: index of the part's first element in the full array.
        shape: shape of the full array.
        copy: whether another rank holds the same part and writes it.
    """

    values: NDArray[Any]
    offset: Shape
    shape: Shape
    copy: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A stored array that can be read in parts.

    Attributes:
        name: name of the array in the files.
        dtype: dtype of the array.
        shape: shape of the full array.
        pieces: (file, offset in the full array, shape) of each piece.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    pieces: tuple[tuple[Path, Shape, Shape], ...]

    def read(self, offset: Shape | None = None, shape: Shape | None = None) -> NDArray[Any]:
        """Return a part of the array.

        Args:
            offset: index of the part's first element; None for the first element of the full array.
            shape: shape of the part; None for the shape of the full array.

        Raises:
            NonRetryableError: a file cannot be read.
        """
        offset = (0,) * len(self.shape) if offset is None else offset
        shape = self.shape if shape is None else shape
        values = np.empty(shape, self.dtype)
        for path, begin, extent in self.pieces:
            low = [max(pair) for pair in zip(offset, begin)]
            high = [min(a + b, c + d) for a, b, c, d in zip(offset, shape, begin, extent)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            try:  # open the file again for each piece, to free its memory map afterwards
                with safe_open(path, framework="numpy") as file:
                    source = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, begin))
                    part = file.get_slice(self.name)[source] if source else file.get_tensor(self.name)
                values[tuple(slice(a - c, b - c) for a, b, c in zip(low, high, offset))] = part
            except (OSError, SafetensorError, ValueError) as error:
                raise NonRetryableError(f"{path}: {self.name} cannot be read: {error}") from error
        return values

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the full array in C order, in parts of at most BLOCK bytes.

        Raises:
            NonRetryableError: a file cannot be read.
        """
        for offset, shape in _split((0,) * len(self.shape), self.shape, max(1, BLOCK // self.dtype.itemsize)):
            yield self.read(offset, shape)


ShardGroups = Mapping[
    str, Mapping[str, TensorShard]
]  # a rank's shards by group and name, with the same names on every rank
StoredGroups = Mapping[str, Mapping[str, StoredTensor]]  # stored arrays by group and name


def _split(offset: Shape, shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Divide a part of an array.

    Args:
        offset: index of the part's first element in the full array.
        shape: shape of the part.
        most: maximum number of elements.

    Yields:
        (offset, shape) of parts of at most ``most`` elements, in C order.
    """
    size = math.prod(shape)
    axis = next((axis for axis, length in enumerate(shape) if length > 1), None)
    if size <= most or axis is None:
        yield offset, shape
        return
    rows = max(1, shape[axis] * most // size)
    for first in range(0, shape[axis], rows):
        at, count = offset[axis] + first, min(rows, shape[axis] - first)
        yield from _split((*offset[:axis], at, *offset[axis + 1 :]), (*shape[:axis], count, *shape[axis + 1 :]), most)
