"""A safetensors file's bytes without copies of what is large: a checkpoint holds a step up for half as long."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

Part = Union[bytes, memoryview]  # of a file's content
SMALL = 1 << 20  # bytes: below, a thread or a write more costs more than a copy

# numpy's dtypes (without their byte order) under safetensors' names, in the order in which its own writer sorts arrays.
DTYPES = {
    "u8": "U64",
    "i8": "I64",
    "f8": "F64",
    "c8": "C64",
    "f4": "F32",
    "u4": "U32",
    "i4": "I32",
    "f2": "F16",
    "u2": "U16",
    "i2": "I16",
    "i1": "I8",
    "u1": "U8",
    "b1": "BOOL",
}
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}


def encode(arrays: Mapping[str, NDArray[Any]]) -> list[Part]:
    """What `safetensors.numpy.save` gives, without copies where they count: a header, and the arrays' own memory."""
    begin, places = layout(arrays)
    parts: list[Part] = [begin]
    for array in (arrays[name] for name in places):
        if array.dtype.str[0] == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        large = array.nbytes > SMALL
        parts.append(np.asarray(array, order="C").reshape(-1).view(np.uint8).data if large else array.tobytes())
    return parts if sum(len(part) for part in parts) > SMALL else [b"".join(parts)]


def layout(arrays: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """How a file begins, and at which byte each array begins, in their order; of arrays it takes dtype and shape alone.

    Format: the header's length in 8 bytes, little-endian; the header in JSON, padded with spaces to a multiple of 8;
    the arrays in C order, little-endian. Source: https://huggingface.co/docs/safetensors, "Format".
    """
    dtypes = {name: array.dtype.str[1:] for name, array in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {arrays[name].dtype}, which no safetensors file can hold")
    header, places, end = {}, {}, 0
    for name in sorted(arrays, key=lambda name: (_PLACES[dtypes[name]], name)):
        shape = arrays[name].shape
        places[name], end = end, end + math.prod(shape) * arrays[name].dtype.itemsize
        header[name] = {"dtype": DTYPES[dtypes[name]], "shape": shape, "data_offsets": [places[name], end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    begin = len(encoded).to_bytes(8, "little") + encoded
    return begin, {name: len(begin) + place for name, place in places.items()}
