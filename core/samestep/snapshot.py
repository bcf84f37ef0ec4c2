"""Copy arrays into memory that is reused, as the contents of safetensors files.

A save copies within the step. A thread hashes and writes the copy, while training changes the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.safetensors_layout import layout

Arrays = Mapping[str, NDArray[Any]]
_ALIGNMENT = 64  # bytes
_free: list[NDArray[np.uint8]] = []  # memory that a later snapshot takes: a copy into new pages takes longer


class Snapshot:
    """A copy of arrays, as the contents of safetensors files.

    Attributes:
        sizes: bytes of each file, by its name.
        contents: bytes of each file, by its name, from `copy` to `close`.
        arrays: the copied arrays by file and name, as views of the contents, also from `copy` to `close`.
    """

    def __init__(self, files: Mapping[str, Arrays]) -> None:
        """Lay out the files. The bytes are those that ``safetensors.numpy.save`` returns.

        Args:
            files: the arrays of each file, by its name, which `samestep.checkpoint.check_array` accepts.
        """
        self.sizes: dict[str, int] = {}
        self.contents: dict[str, memoryview] = {}
        self.arrays: dict[str, dict[str, NDArray[Any]]] = {}
        self._files = files
        self._layouts = {name: layout(arrays) for name, arrays in files.items()}
        self._memory: NDArray[np.uint8] | None = None
        for name, arrays in files.items():
            header, _ = self._layouts[name]
            self.sizes[name] = len(header) + sum(array.nbytes for array in arrays.values())

    def copy(self) -> None:
        """Copy the arrays, which may change afterwards."""
        self._memory = _take(sum(size + _ALIGNMENT for size in self.sizes.values()))
        begin = 0
        for name, size in self.sizes.items():
            content = self._memory[begin : begin + size]
            self.arrays[name] = self._fill(name, content)
            self.contents[name] = content.data
            begin += -(-size // _ALIGNMENT) * _ALIGNMENT

    def _fill(self, name: str, content: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Write the header and the arrays of a file; return the copied arrays."""
        header, places = self._layouts[name]
        content[: len(header)] = np.frombuffer(header, np.uint8)
        copies = {}
        for array_name, array in self._files[name].items():
            first = places[array_name]
            stored_dtype = array.dtype.newbyteorder("<")
            copied = content[first : first + array.nbytes].view(stored_dtype).reshape(array.shape)
            copied[...] = array
            copies[array_name] = copied
        return copies

    def close(self) -> None:
        """Let a later snapshot take the memory. ``contents`` and ``arrays`` are then empty."""
        self.contents.clear()
        self.arrays.clear()
        if self._memory is not None:
            _free.append(self._memory)
            self._memory = None


def _take(size: int) -> NDArray[np.uint8]:
    """Return memory of at least ``size`` bytes that no other snapshot uses."""
    try:
        memory = _free.pop()
    except IndexError:  # the first, or another thread's save uses it
        return np.empty(size, np.uint8)
    if len(memory) < size:
        return np.empty(size, np.uint8)
    return memory
