"""Read files and JSON that another program, another user or a crash may have written, and write beside such files.

Nothing here blocks on a FIFO, follows a link to write, or raises anything but OSError and ValueError. Standard library
only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Callable

MAX_BYTES = 2**20  # that are read of any file
Check = Callable[[Any], bool]  # whether a JSON value is one of a kind


def read_bytes(path: Path, max_bytes: int = -1) -> bytes:
    """Return the first ``max_bytes`` (all for -1) of a regular file; b"" for anything else. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return file.read(max_bytes) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file; "" for anything else. Raises OSError if it cannot be read."""
    return read_bytes(path, max_bytes).decode(errors="replace")


def open_regular(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Open or make a file to write; return its descriptor. Raises OSError for a link, a FIFO or a directory."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "not a regular file (remove it)", str(path))
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)


def own_folder(path: Path) -> os.stat_result | None:
    """Return the status of a folder in a place that others write to, made with mode 700 if it is missing.

    It is None if the folder cannot be made, is another user's, or is a link.
    """
    try:
        path.mkdir(0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError:
        return None
    return status if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() else None


def open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream, because a file opened next would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
            setattr(sys, name, open(number, mode))


def create(path: Path) -> IO[bytes]:
    """Open a new file to write; a file or a link that has its place is deleted. Raises OSError."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def write_json(folder: Path, name: str, values: Mapping[str, Any], writer: int) -> None:
    """Write a file of ``folder`` atomically. ``writer`` is the rank that writes it; errors are ignored."""
    temporary = folder / f".{name}.{writer}.tmp"
    try:
        with create(temporary) as file:
            file.write(json.dumps(values).encode())
        temporary.replace(folder / name)
    except OSError:  # a full disk must not stop the training; the checkpoint will report it
        with contextlib.suppress(OSError):
            os.utime(folder / name)  # the launch script takes a heartbeat that does not change for a stopped rank


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


def number(low: float = -sys.float_info.max, high: float = sys.float_info.max) -> Check:
    """Return a check for numbers in [low, high]; NaN and infinity fail it."""
    return lambda value: type(value) in (int, float) and low <= value <= high


def optional(of: Check) -> Check:
    """Return a check for null and values that pass the check ``of``."""
    return lambda value: value is None or of(value)


def text(length: int) -> Check:
    """Return a check for strings of at most ``length`` characters."""
    return lambda value: isinstance(value, str) and len(value) <= length


def mapping(of: Check, size: int = 1000) -> Check:
    """Return a check for objects of at most ``size`` values that pass the check ``of``."""
    return lambda value: isinstance(value, dict) and len(value) <= size and all(map(of, value.values()))


def printable(line: str) -> str:
    """Return the line with a replacement character for each control character, as a terminal would obey those."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
