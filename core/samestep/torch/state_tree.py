"""Convert the state of a program's parts to JSON and arrays, and back with the same types, without pickle.

JSON contains the structure. Each value without a JSON type becomes an object with a tag. Each tensor becomes an array
whose name is its path, such as "state.0.exp_avg". A model's arrays have the names of its parameters and buffers.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.torch.sharded_state import LocalPart, is_sharded, to_array

Arrays = dict[str, Any]  # NumPy arrays by name; also DTensors from `encode`, and `LocalPart` objects for `decode`
MAX_DEPTH = 100
_MAX_INT = 2**63  # larger integers are stored in hexadecimal, because Python parses at most 4300 decimal digits
_NUMPY_KINDS = frozenset("biufc")
_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "default-none": None,
    "default-int": int,
    "default-float": float,
    "default-list": list,
    "default-dict": dict,
}
_TAG_OF: dict[Any, str] = {kind: tag for tag, kind in {**_SEQUENCES, **_MAPPINGS}.items()}


def encode(tree: Any, name: str, with_values: bool = True) -> tuple[Any, Arrays]:
    """Convert a tree of Python values and tensors to JSON values and arrays.

    Args:
        tree: a value that consists of None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict,
            OrderedDict, Counter, defaultdict, tensors, NumPy's arrays and scalars, and torch's Size, dtype and device.
            DTensors are returned unchanged among the arrays.
        name: name of the tree. Paths in messages begin with this name.
        with_values: whether to read the arrays. If False, `encode` only checks the tree, and returns empty arrays.

    Returns:
        The structure, and the arrays by path. The arrays may be views of the tree's values.

    Raises:
        TypeError: `decode` could not restore a value; the message has its path.
    """
    encoder = _Encoder(name, with_values)
    structure = encoder.walk(tree, ())
    return structure, encoder.arrays


class _Encoder:
    def __init__(self, name: str, with_values: bool) -> None:
        self.arrays: Arrays = {}
        self._name = name
        self._with_values = with_values
        self._parents: list[int] = []  # ids of the containers around a value

    def walk(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return the JSON form of a value at ``path``, a tuple of keys."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float, bytes, torch.dtype, torch.device):
            return _encode_leaf(value)
        if kind is Tensor:
            return self._tensor(value, path)
        if is_sharded(value):
            return self._sharded(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, path)
        return self._container(value, path)

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        tag = _tag_of(value)
        if tag is None:
            raise TypeError(f"{self._show(path)} is a {_describe(type(value))}, which a checkpoint cannot hold")
        if len(path) > MAX_DEPTH:
            raise TypeError(f"{self._show(path[:5])}... is nested more than {MAX_DEPTH} levels deep")
        if id(value) in self._parents:
            raise TypeError(f"{self._show(path)} contains itself")
        self._parents.append(id(value))
        if isinstance(value, dict):
            result = self._mapping(tag, value, path)
        else:
            result = {tag: [self.walk(each, (*path, number)) for number, each in enumerate(value)]}
        self._parents.pop()
        return result

    def _mapping(self, tag: str, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        pairs = []
        for key, each in value.items():
            inside = (*path, key)
            pairs.append([self.walk(key, inside), self.walk(each, inside)])
        metadata = getattr(value, "_metadata", None)  # a module's state_dict has this attribute
        if metadata is None:
            return {tag: pairs}
        return {tag: pairs, "metadata": self.walk(metadata, (*path, "_metadata"))}

    def _tensor(self, value: Tensor, path: tuple[Any, ...]) -> Any:
        if value.layout is not torch.strided or value.is_quantized:
            raise TypeError(
                f"{self._show(path)} is a tensor with layout {value.layout}, which a checkpoint cannot hold"
            )
        if value.is_meta:
            raise TypeError(f"{self._show(path)} is a tensor without values (device meta)")
        array = to_array(value) if self._with_values else np.empty(0)
        result = {
            "tensor": self._store(array, path),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
        is_dense = torch.empty_like(value, device="meta").stride() == value.stride()
        if not value.is_contiguous() and is_dense:
            result["strides"] = list(value.stride())  # for memory formats such as channels_last
        return result

    def _sharded(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value.dtype.is_complex:
            raise TypeError(f"{self._show(path)} is a sharded {value.dtype}, which a checkpoint cannot hold")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": self._store(value, path), "dtype": dtype, "shape": list(value.shape)}

    def _array(self, value: Any, path: tuple[Any, ...]) -> Any:
        is_plain = type(value) is np.ndarray or isinstance(value, np.generic)
        dtype = value.dtype
        if not is_plain or dtype.kind not in _NUMPY_KINDS or dtype.itemsize > 8 or not dtype.isnative:
            what = f"numpy {dtype}" if is_plain else _describe(type(value))
            raise TypeError(f"{self._show(path)} is a {what}, which a checkpoint cannot hold")
        array = np.asarray(value) if self._with_values else np.empty(0)
        tag = "scalar" if isinstance(value, np.generic) else "array"
        return {tag: self._store(array, path), "shape": list(value.shape)}

    def _store(self, array: Any, path: tuple[Any, ...]) -> str:
        """Store an array under its path, and return its name. Append a number if another array has this name."""
        path_name = ".".join(map(str, path)) or "value"
        name = path_name
        number = 1
        while name in self.arrays or name == "__metadata__":  # safetensors reserves this name
            number += 1
            name = f"{path_name}~{number}"
        self.arrays[name] = array
        return name

    def _show(self, path: tuple[Any, ...]) -> str:
        """Return a path as Python code, such as "optimizer['state'][0]"."""
        return self._name + "".join(f"[{key!r:.60}]" for key in path)


def _encode_leaf(value: Any) -> Any:
    if isinstance(value, float):
        is_finite = value - value == 0
        return value if is_finite else {"float": value.hex()}
    if isinstance(value, int):
        return value if abs(value) < _MAX_INT else {"int": hex(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return {f"torch.{type(value).__name__}": str(value).removeprefix("torch.")}


def _tag_of(value: Any) -> str | None:
    """Return the tag of a container, such as a list or a dict; None for other types."""
    if type(value) is not defaultdict:
        return _TAG_OF.get(type(value))
    for tag, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return tag
    return None


def _describe(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def decode(value: Any, arrays: Arrays) -> Any:
    """Return the tree from the result of `encode`, with tensors on the CPU.

    Args:
        value: the structure.
        arrays: the arrays by name.

    Raises:
        ValueError: a value is not from `encode`. KeyError and TypeError are also possible.
    """
    if not isinstance(value, dict):
        return value
    for tag, content in value.items():
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([decode(each, arrays) for each in content])
        if tag in _MAPPINGS or tag in _FACTORIES:
            return _decode_mapping(tag, value, arrays)
        if tag in _LEAVES:
            return _LEAVES[tag](value, arrays)
    raise ValueError(f"unknown value {str(value)[:60]!r}")


def _decode_mapping(tag: str, value: dict[str, Any], arrays: Arrays) -> Any:
    result: Any = _MAPPINGS[tag]() if tag in _MAPPINGS else defaultdict(_FACTORIES[tag])
    for key, each in value[tag]:
        result[decode(key, arrays)] = decode(each, arrays)
    if "metadata" in value:
        result._metadata = decode(value["metadata"], arrays)
    return result


def _decode_tensor(value: dict[str, Any], arrays: Arrays) -> Tensor:
    dtype = getattr(torch, value["dtype"])
    shape = value["shape"]
    part = arrays.get(value["tensor"])
    if isinstance(part, LocalPart):
        return part.tensor(dtype)
    if math.prod(shape) == 0:  # safetensors returns an array of shape (0, 3) with strides (0, 0)
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_numpy(arrays[value["tensor"]].copy())
    if dtype.is_complex:
        flat = torch.view_as_complex(flat.reshape(*shape, 2))
    elif flat.dtype != dtype:
        flat = flat.reshape(-1).view(dtype)
    tensor = flat.reshape(shape)
    if "strides" not in value:
        return tensor
    return torch.empty_strided(shape, value["strides"], dtype=dtype).copy_(tensor)


def _decode_array(value: dict[str, Any], arrays: Arrays) -> Any:
    return arrays[value["array"]].reshape(value["shape"]).copy()


def _decode_scalar(value: dict[str, Any], arrays: Arrays) -> Any:
    return arrays[value["scalar"]].reshape(())[()]


_LEAVES: dict[str, Callable[[dict[str, Any], Arrays], Any]] = {
    "float": lambda value, arrays: float.fromhex(value["float"]),
    "int": lambda value, arrays: int(value["int"], 16),
    "bytes": lambda value, arrays: base64.b64decode(value["bytes"]),
    "torch.dtype": lambda value, arrays: getattr(torch, value["torch.dtype"]),
    "torch.device": lambda value, arrays: torch.device(value["torch.device"]),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": _decode_scalar,
}
