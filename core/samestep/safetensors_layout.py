"""Compute the layout of a safetensors file, so that its arrays can be written one block at a time.

The safetensors library itself cannot write a part of an array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

# numpy's dtypes (without byte order) and their names in safetensors, in the order in which safetensors sorts arrays.
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


def layout(arrays: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """Compute the header of a safetensors file and the positions of its arrays.

    A file begins with the header's length in 8 bytes, little-endian. The header follows in JSON, padded with spaces to
    a multiple of 8 bytes. The arrays come last, in C order, little-endian. This format is described in
    https://huggingface.co/docs/safetensors, "Format".

    Args:
        arrays: objects with ``dtype`` and ``shape``, by name.

    Returns:
        The bytes before the first array, and the position of each array's first byte, by name in the file's order.

    Raises:
        TypeError: the format does not support a dtype.
    """
    dtypes = {name: array.dtype.str[1:] for name, array in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {arrays[name].dtype}, which no safetensors file can hold")
    order = list(DTYPES).index
    header = {}
    places = {}
    end = 0
    for name in sorted(arrays, key=lambda name: (order(dtypes[name]), name)):
        shape = arrays[name].shape
        places[name] = end
        end += math.prod(shape) * arrays[name].dtype.itemsize
        header[name] = {"dtype": DTYPES[dtypes[name]], "shape": shape, "data_offsets": [places[name], end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    begin = len(encoded).to_bytes(8, "little") + encoded
    return begin, {name: len(begin) + place for name, place in places.items()}
