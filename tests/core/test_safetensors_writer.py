"""A safetensors file's bytes: those of the library, made without copies of what is large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from samestep import safetensors_writer
from samestep.checkpoint import Arrays
from samestep.safetensors_writer import encode

DTYPES = "uint64 int64 float64 complex64 float32 uint32 int32 float16 uint16 int16 int8 uint8 bool >f8 >i2".split()


@given(
    shapes=st.dictionaries(
        st.text(max_size=9),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
        max_size=20,
    ),
    small=st.sampled_from([0, 10, 1 << 20]),
)
def test_a_file_is_byte_by_byte_what_the_safetensors_library_writes(shapes: dict[str, Any], small: int) -> None:
    """The library copies all arrays twice, so its format is written here; large arrays are not copied at all."""
    draw = np.random.default_rng(len(shapes))
    arrays: Arrays = {}
    for name, (dtype, shape, transposed) in shapes.items():
        array = draw.integers(0, 100, shape).astype(dtype)
        arrays[name] = array.T if transposed else array
    wanted = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_writer, "SMALL", small)
        assert b"".join(encode(arrays)) == wanted


def test_a_large_array_is_its_own_memory_and_not_a_copy() -> None:
    array: NDArray[Any] = np.zeros(safetensors_writer.SMALL // 8 + 1)
    *_, part = encode({"large": array})
    array[-1] = 1.0
    assert bytes(part[-8:]) == np.float64(1.0).tobytes()


@pytest.mark.parametrize("dtype", ["complex128", "M8[s]", "U3", "O"])
def test_what_no_safetensors_file_can_hold_is_refused_with_its_name(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"weight is .*, which no safetensors file can hold"):
        encode({"fine": np.zeros(2), "weight": np.zeros(2, dtype)})
