"""Test the checksums of arrays that the ranks compare before a save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samestep import checksums

DTYPES = "uint64 int64 float64 complex64 float32 uint32 int32 float16 uint16 int16 int8 uint8 bool".split()


def shapes_and_layouts() -> dict[str, NDArray[Any]]:
    """Return arrays of all dtypes, arrays of 0 to 25 bytes, and 0-d, empty, strided and unaligned arrays."""
    draw = np.random.default_rng(0)
    found: dict[str, NDArray[Any]] = {}
    for dtype in DTYPES:
        itemsize = np.dtype(dtype).itemsize
        for count in (0, 1, 3, 5):
            content = draw.integers(0, 2, count * itemsize, dtype=np.uint8)  # the bytes 0 and 1 are valid in any dtype
            found[f"{dtype} [{count}]"] = content.view(dtype)
        found[f"{dtype} []"] = draw.integers(0, 2, itemsize, dtype=np.uint8).view(dtype).reshape(())
        grid = draw.integers(0, 2, 35 * itemsize, dtype=np.uint8).view(dtype).reshape(5, 7)
        found |= {
            f"{dtype} transposed": grid.T,
            f"{dtype} strided": grid[::2, 1::3],
            f"{dtype} reversed": grid[:, ::-1],
        }
    for length in range(26):
        found[f"{length} bytes"] = draw.integers(0, 256, length, dtype=np.uint8)
        found[f"{length} bytes, not aligned"] = np.frombuffer(b"x" + draw.bytes(length), np.uint8)[1:]
    found["empty"] = np.zeros((0, 3), np.float32)
    return found


LAYOUTS = shapes_and_layouts()


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_one_bit_that_is_flipped_changes_the_bit_sum(name: str) -> None:
    array = LAYOUTS[name]
    before = checksums.checksum(array)
    assert 0 <= before < 2**64
    content = bytearray(array.tobytes())
    assert checksums.checksum(np.frombuffer(bytes(content), array.dtype).reshape(array.shape)) == before
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        assert checksums.checksum(np.frombuffer(bytes(content), array.dtype).reshape(array.shape)) != before, bit
        content[bit // 8] ^= 1 << bit % 8


def test_the_bit_sum_is_that_of_the_bits_and_not_of_the_numbers() -> None:
    zeros = np.array([0.0, -0.0, np.nan, np.inf])
    assert checksums.checksum(zeros) == sum(zeros.view(np.uint32).tolist()) % 2**64
    assert checksums.checksum(np.array(-0.0)) == 2**31
    assert checksums.checksum(np.full(8, 2**64 - 1, np.uint64)) == 16 * (2**32 - 1)
    random = np.random.default_rng(1).standard_normal(1000)
    assert checksums.checksum(random) != checksums.checksum(-random)  # the sign bits do not cancel out
    assert checksums.checksum(np.zeros(0)) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_has_the_values_and_the_checksum_of_the_array(name: str) -> None:
    array = LAYOUTS[name]
    target = np.ones(array.shape, array.dtype.newbyteorder("<"))
    found = checksums.copy(array, target)
    assert target.tobytes() == array.astype(target.dtype).tobytes()
    assert found == checksums.checksum(target)


def test_blocks_add_up() -> None:
    content = np.random.default_rng(2).integers(0, 256, 2 * checksums._COPIED + 28, np.uint8)
    expected = sum(content.view(np.uint32).tolist()) % 2**64
    target = np.zeros_like(content)
    assert checksums.copy(content, target) == checksums.checksum(content) == expected
    np.testing.assert_array_equal(target, content)


def test_checksums_of_groups_have_their_names() -> None:
    groups = {"model": {"w": np.array([1.5]), "b": np.array(3)}, "optimizer": {}}
    assert checksums.of_groups(groups) == {"model": {"w": checksums.checksum(np.array(1.5)), "b": 3}, "optimizer": {}}
