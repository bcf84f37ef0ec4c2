"""Read files and JSON that another program, another user or a crash may have written. Standard library only.

Nothing here blocks on a FIFO, reads without a limit, or raises anything but OSError and ValueError.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

MAX_BYTES = 2**20  # that are read of any file
Check = Callable[[Any], bool]  # whether a JSON value is one of a kind


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file; "" for anything else. Raises OSError if it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(max_bytes).decode(errors="replace") if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none, or a crash left it damaged."""
    with contextlib.suppress(OSError, ValueError):
        return parse_object(read_text(path))
    return {}


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for other text, another JSON value, and nesting too deep to parse."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def check(values: Mapping[str, Any], schema: Mapping[str, Check]) -> None:
    """Raise ValueError that names the first field of ``schema`` that ``values`` lacks, or that is of another kind."""
    for name, is_valid in schema.items():
        if name not in values or not is_valid(values[name]):
            raise ValueError(f"{name} is {printable(repr(values.get(name)))[:60]}")


def integer(low: int, high: int) -> Check:
    """Return a check for whole numbers in [low, high]; True and False are none."""
    return lambda value: type(value) is int and low <= value <= high


def text(length: int) -> Check:
    """Return a check for strings of at most ``length`` characters."""
    return lambda value: isinstance(value, str) and len(value) <= length


def mapping(of: Check, size: int = 1000) -> Check:
    """Return a check for objects of at most ``size`` values that pass the check ``of``."""
    return lambda value: isinstance(value, dict) and len(value) <= size and all(map(of, value.values()))


def printable(line: str) -> str:
    """Return the line with a replacement character for each control character, as a terminal would obey those."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
