"""Change the rows of a batch: tensors, arrays and lists in dicts, lists, tuples and other mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map

_CONSTANTS = (int, float, complex, str, bytes, np.generic, type(None))  # a batch may have these values for all its rows


def map_values(change: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a batch of the same type, with ``change`` applied to each value.

    Args:
        change: function of a value, such as a tensor.
        batch: the values in dicts, lists, tuples and other mappings, such as a UserDict.
        is_leaf: function that returns whether a list or tuple is a value itself, or None.
    """

    def change_leaf(value: Any) -> Any:
        if not isinstance(value, MutableMapping):
            return change(value)
        changed = copy.copy(value)  # a mapping that tree_map does not know
        for name, each in value.items():
            changed[name] = map_values(change, each, is_leaf)
        return changed

    return tree_map(change_leaf, batch, is_leaf=is_leaf)


def empty_batch(batch: Any) -> Any:
    """Return a batch of the same type with 0 rows."""
    return map_values(without_rows, batch)


def without_rows(value: Any) -> Any:
    """Return a tensor or an array without its rows, and other values unchanged."""
    return value[:0] if has_dimensions(value) else value


def has_dimensions(value: Any) -> bool:
    """Return whether a value is a tensor or an array with at least one dimension."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def rows_of(batch: Any, rows: int, begin: int, end: int) -> Any:
    """Return the rows [begin, end) of a batch, which has the same type.

    Args:
        batch: tensors and arrays [rows, ...], and lists of one number or string per row, in dicts, lists and tuples.
            Other numbers and strings, None and tensors without dimensions belong to all rows.
        rows: number of rows of the batch.
        begin: index of the first row.
        end: index after the last row.

    Raises:
        TypeError: the batch has an object of another type.
        ValueError: a tensor or an array has another number of rows.
    """

    def is_column(value: Any) -> bool:
        is_list = type(value) in (list, tuple)
        return is_list and len(value) == rows > 0 and all(isinstance(each, _CONSTANTS) for each in value)

    def cut(value: Any) -> Any:
        if is_column(value):
            return value[begin:end]
        if has_dimensions(value):
            check_rows(value, rows)
            return value[begin:end]
        if isinstance(value, (Tensor, np.ndarray, *_CONSTANTS)):
            return value
        kind = type(value).__name__
        raise TypeError(f"micro_batches cannot cut a {kind}: return tensors in dicts, lists or tuples")

    return map_values(cut, batch, is_column)


def check_rows(value: Tensor | np.ndarray[Any, Any], rows: int) -> None:
    """Raise ValueError if a tensor or an array has another number of rows than the batch."""
    if len(value) != rows:
        raise ValueError(
            f"micro_batches got a {type(value).__name__} of shape {list(value.shape)} in a batch of {rows} rows: make "
            "the batch its first dimension"
        )
