"""Copy arrays into reused memory, in the format of safetensors files.

A save copies the arrays before the next step. While training changes the arrays, a thread hashes and writes the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import checksums
from samestep.safetensors_layout import layout

Arrays = Mapping[str, NDArray[Any]]
_ALIGNMENT = 64  # bytes
_free: list[NDArray[np.uint8]] = []  # memory for later snapshots, because a copy into new pages is slower


class Snapshot:
    """A copy of arrays in the format of safetensors files.

    Attributes:
        sizes: number of bytes of each file, by file name.
        contents: bytes of each file, by file name; empty before `copy` and after `close`.
        checksums: `samestep.checksums.checksum` of each copied array, by file name and array name. Empty before `copy`.
    """

    def __init__(self, files: Mapping[str, Arrays]) -> None:
        """Compute the layout of the files. Each file has the same bytes as the result of ``safetensors.numpy.save``.

        Args:
            files: arrays by file name and array name. `samestep.checkpoint.check_array` must accept each array.
        """
        self.sizes: dict[str, int] = {}
        self.contents: dict[str, memoryview] = {}
        self.checksums: dict[str, dict[str, int]] = {}
        self._files = files
        self._layouts = {name: layout(arrays) for name, arrays in files.items()}
        self._memory: NDArray[np.uint8] | None = None
        for name, arrays in files.items():
            header, _ = self._layouts[name]
            self.sizes[name] = len(header) + sum(array.nbytes for array in arrays.values())

    def copy(self, with_checksums: bool = False) -> None:
        """Copy the arrays, so that they may change afterwards. Call this method once.

        Args:
            with_checksums: whether to compute ``checksums``, which takes less time during the copy than afterwards.
        """
        self._memory = _take(sum(size + _ALIGNMENT for size in self.sizes.values()))
        begin = 0
        for name, size in self.sizes.items():
            content = self._memory[begin : begin + size]
            self.checksums[name] = self._fill(name, content, with_checksums)
            self.contents[name] = content.data
            begin += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._files = {}  # the thread that writes the copy must not be the last owner of a framework's memory

    def _fill(self, name: str, content: NDArray[np.uint8], with_checksums: bool) -> dict[str, int]:
        """Write the header and the arrays of a file to ``content``, and return the copies' checksums by name."""
        header, places = self._layouts[name]
        content[: len(header)] = np.frombuffer(header, np.uint8)
        sums = {}
        for array_name, array in self._files[name].items():
            first = places[array_name]
            stored_dtype = array.dtype.newbyteorder("<")
            copied = content[first : first + array.nbytes].view(stored_dtype).reshape(array.shape)
            if with_checksums:
                sums[array_name] = checksums.copy(array, copied)
            else:
                copied[...] = array
        return sums

    def close(self) -> None:
        """Release the memory for later snapshots, and empty ``contents``."""
        self.contents.clear()
        if self._memory is not None:
            _free.append(self._memory)
            self._memory = None


def _take(size: int) -> NDArray[np.uint8]:
    """Return memory of at least ``size`` bytes that no other snapshot uses."""
    try:
        memory = _free.pop()
    except IndexError:  # this is the first snapshot, or another thread's save uses the memory
        return np.empty(size, np.uint8)
    if len(memory) < size:
        return np.empty(size, np.uint8)
    return memory
