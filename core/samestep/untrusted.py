"""Read files and JSON that another program, another user or a crash may have written, and show their text.

Nothing here blocks on a FIFO, follows a link to write, or raises anything but OSError and ValueError. `samestep.root`
has the functions that write beside such files. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Callable

from samestep.root import Root

MAX_BYTES = 2**20  # that are read of any file
MAX_LINE = 4000  # characters of a line on the console
Check = Callable[[Any], bool]  # whether a JSON value is one of a kind


class IrregularFileError(OSError):
    """A folder, a FIFO, a socket or a device has the place of a file."""


def open_to_read(path: Path) -> BufferedReader:
    """Open a file to read. Raises OSError, for anything but a regular file IrregularFileError."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # without blocking on a FIFO
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise IrregularFileError(errno.EINVAL, "not a file", str(path))
    return file


def read_bytes(path: Path, max_bytes: int = -1) -> bytes:
    """Return the first ``max_bytes`` (all for -1) of a regular file; b"" for anything else. Raises OSError."""
    try:
        with open_to_read(path) as file:
            return file.read(max_bytes)
    except IrregularFileError:
        return b""


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file; "" for anything else. Raises OSError if it cannot be read."""
    return read_bytes(path, max_bytes).decode(errors="replace")


def open_regular(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Open or make a file to write, in a folder that is trusted; return its descriptor. Raises as `Root.open`.

    Args:
        path: path of the file.
        flags: of `os.open`.
        mode: permissions of a new file.
    """
    path = Path(path)
    return Root(path.parent).open(path.name, flags, mode)


def own_folder(path: Path) -> os.stat_result | None:
    """Return the status of a folder in a place that others write to, made with mode 700 if it is missing.

    It is None if the folder cannot be made, is another user's, or is a link.
    """
    try:
        path.mkdir(0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return status if is_own else None


def open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream, because a file opened next would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
            setattr(sys, name, open(number, mode))


def write_json(folder: Path, name: str, values: Mapping[str, Any], writer: int) -> None:
    """Write a file of ``folder``, a folder of a run dir, atomically. Errors are ignored.

    ``writer`` is the rank that writes it.

    Args:
        folder: a folder of a run dir.
        name: name of the file.
        values: content.
        writer: rank that writes the file.
    """
    root = Root(folder.parent)
    temporary = f"{folder.name}/.{name}.{writer}.tmp"
    try:
        with root.create(temporary) as file:
            file.write(json.dumps(values).encode())
        root.rename(temporary, f"{folder.name}/{name}")
    except OSError:  # a full disk must not stop the training; the checkpoint will report it
        with contextlib.suppress(OSError):
            root.touch(f"{folder.name}/{name}")  # the launch script takes an unchanged heartbeat for a stopped rank


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
            raise ValueError(f"{name} is {shown(repr(values.get(name)), limit=60)}")


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


def shown(value: object, limit: int = 80) -> str:
    """Return a value of a file or of the environment as a part of a message.

    Every such value passes through here, so that it can neither begin a line of its own, control a terminal, nor flood
    a console.

    Args:
        value: any value; its ``str`` is shown.
        limit: the most characters to return; a longer text ends with "...".

    Returns:
        One line of printable characters.
    """
    text = value if isinstance(value, str) else _text(value)
    line = printable(" ".join(text[: 4 * limit].split()))
    if len(line) > limit or len(text) > 4 * limit:
        return f"{line[: limit - 3]}..."
    return line


def _text(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to convert an int of more than 4,300 digits
        return f"a very long {type(value).__name__}"


def printable(line: str) -> str:
    """Return the line with a replacement character for each control character, as a terminal would obey those."""
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
