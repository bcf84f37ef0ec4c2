"""Compute checksums of arrays. Before a save, the ranks compare these checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Checksums = Mapping[str, Mapping[str, int]]  # by group and name
_BLOCK = 2**15  # 64-bit words per block, so that a block fits into a processor's cache
_HALF = np.uint64(32)  # bits
_COPIED = 2**20  # bytes that `copy` copies before it adds them: few calls, and the bytes are still in the cache


def checksum(array: NDArray[Any]) -> int:
    """Return the sum, modulo 2**64, of an array's bytes as 32-bit words. A flip of any single bit changes the sum.

    The words are half as wide as the sum, so that two sign bits that become 1 do not cancel. The sum is much faster
    than SHA-256.

    NumPy adds 64-bit words faster than it widens 32-bit words. So this function adds the 64-bit words of each block,
    and separately their upper halves.
    """
    content = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    whole = len(content) // 8 * 8
    words = content[:whole].view(np.uint64)
    upper = np.empty(min(_BLOCK, len(words)), np.uint64)
    total = 0
    upper_total = 0
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK]
        total += int(np.add.reduce(block))
        upper_total += int(np.add.reduce(np.right_shift(block, _HALF, out=upper[: len(block)])))
    rest = content[whole:].tobytes()
    total += int.from_bytes(rest[:4], "little") + int.from_bytes(rest[4:], "little")
    return (total - (upper_total << 32) + upper_total) % 2**64


def of_groups(groups: Mapping[str, Mapping[str, NDArray[Any]]]) -> Checksums:
    """Return the checksums of arrays by group and name."""
    return {group: {name: checksum(array) for name, array in arrays.items()} for group, arrays in groups.items()}


def copy(array: NDArray[Any], target: NDArray[Any]) -> int:
    """Copy ``array`` to ``target``, and return the checksum of the copy.

    Args:
        array: values of any shape and strides.
        target: contiguous array of the same shape. Its dtype is the same or has the other byte order.
    """
    if array.dtype != target.dtype or not array.flags.c_contiguous:
        target[...] = array
        return checksum(target)
    content = array.reshape(-1).view(np.uint8)
    copied = target.reshape(-1).view(np.uint8)
    total = 0
    for begin in range(0, len(content), _COPIED):
        block = slice(begin, begin + _COPIED)
        copied[block] = content[block]
        total += checksum(copied[block])
    return total % 2**64
