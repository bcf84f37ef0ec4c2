"""Test that `layout` returns the file layout of the safetensors library before any array is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from samestep import checksums
from samestep.checkpoint import Arrays, serialize
from samestep.safetensors_layout import layout
from samestep.snapshot import Snapshot

DTYPES = "uint64 int64 float64 complex64 float32 uint32 int32 float16 uint16 int16 int8 uint8 bool".split()


@given(
    shapes=st.dictionaries(
        st.text(max_size=9),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=20,
    ),
)
def test_a_file_is_byte_by_byte_what_the_safetensors_library_writes(shapes: dict[str, Any]) -> None:
    draw = np.random.default_rng(len(shapes))
    arrays: Arrays = {name: draw.integers(0, 100, shape).astype(dtype) for name, (dtype, shape) in shapes.items()}
    begin, places = layout(arrays)
    content = bytearray(begin + bytes(sum(array.nbytes for array in arrays.values())))
    for name, place in places.items():
        content[place : place + arrays[name].nbytes] = arrays[name].tobytes()
    assert bytes(content) == safetensors.numpy.save(arrays)


def test_a_snapshot_is_the_file_of_the_arrays_as_they_were() -> None:
    """The arrays have any strides or are NumPy scalars, and change after the copy."""
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    model: Arrays = {"turned": whole.T, "part": whole[1:3, ::2], "none": np.empty((0, 3)), "flag": np.array(True)}
    optimizer: dict[str, Any] = {"step": np.int64(7), "bytes": np.arange(5, dtype=np.uint8)}
    files = {"model.safetensors": model, "optimizer.safetensors": optimizer, "empty.safetensors": {}}
    expected = {name: serialize(arrays) for name, arrays in files.items()}
    expected_sums = checksums.of_groups(files)
    for with_checksums in (False, True):  # the second snapshot reuses the memory of the first
        snapshot = Snapshot(files)
        snapshot.copy(with_checksums)
        before = whole.copy()
        whole[...] = -1
        assert {name: bytes(content) for name, content in snapshot.contents.items()} == expected
        assert snapshot.sizes == {name: len(content) for name, content in expected.items()}
        assert not with_checksums or snapshot.checksums == expected_sums
        snapshot.close()
        whole[...] = before
        assert not snapshot.contents


@pytest.mark.parametrize("dtype", ["complex128", "M8[s]", "U3", "O"])
def test_what_no_safetensors_file_can_hold_is_refused_with_its_name(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"weight is .*, which no safetensors file can hold"):
        layout({"fine": np.zeros(2), "weight": np.zeros(2, dtype)})
