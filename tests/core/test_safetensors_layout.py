"""The layout of a safetensors file: the library's own, known before any array is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from samestep.checkpoint import Arrays
from samestep.safetensors_layout import layout

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


@pytest.mark.parametrize("dtype", ["complex128", "M8[s]", "U3", "O"])
def test_what_no_safetensors_file_can_hold_is_refused_with_its_name(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"weight is .*, which no safetensors file can hold"):
        layout({"fine": np.zeros(2), "weight": np.zeros(2, dtype)})
