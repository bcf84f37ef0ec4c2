"""Read and validate untrusted files and JSON, and print their text safely.

Another program, another user or a crash may have changed such a file. The functions here do not block on a FIFO, and do
not follow links when they write. The functions raise only OSError and ValueError. This module uses the standard library
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
from io import BufferedReader
from pathlib import Path
from typing import Any, Callable

from samestep.root import Root

MAX_BYTES = 2**20  # maximum bytes of a file that `read_text` reads by default
MAX_LINE = 4000  # maximum characters of a line on the console
Check = Callable[[Any], bool]  # returns whether a JSON value is valid


class IrregularFileError(OSError):
    """The path of a file leads to a folder, a FIFO, a socket or a device."""


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file for reading in binary.

    Raises:
        IrregularFileError: the path leads to a folder, a FIFO, a socket or a device.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # O_NONBLOCK: a FIFO must not block
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise IrregularFileError(errno.EINVAL, "not a file", str(path))
    return file


def read_bytes(path: Path, max_bytes: int = -1) -> bytes:
    """Return the first ``max_bytes`` bytes of a regular file (-1: all), or b"" if the path leads to something else.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open_to_read(path) as file:
            return file.read(max_bytes)
    except IrregularFileError:
        return b""


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the first ``max_bytes`` bytes of a regular file as text, or "" if the path leads to something else.

    Raises:
        OSError: the file cannot be read.
    """
    return read_bytes(path, max_bytes).decode(errors="replace")


def open_regular(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Open or create a file in a trusted folder, and return its descriptor.

    Args:
        path: path of the file.
        flags: flags for `os.open`, without O_TRUNC.
        mode: permissions of a new file.

    Raises:
        OSError: as in `Root.open`.
    """
    path = Path(path)
    return Root(path.parent).open(path.name, flags, mode)


def own_folder(path: Path) -> os.stat_result | None:
    """Return the status of this user's folder in a shared place such as /tmp; create it with mode 700 if missing.

    Returns:
        The folder's status; None if the path is a link, belongs to another user, or cannot be created.
    """
    try:
        path.mkdir(0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return status if is_own else None


def open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream, so that no other file gets its descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # os.open uses the lowest free descriptor
            setattr(sys, name, open(number, mode))


def write_json(folder: Path, name: str, values: Mapping[str, Any], writer: int) -> OSError | None:
    """Write a JSON file atomically. Return the OSError if the write fails, else None.

    Args:
        folder: a folder directly below the run dir.
        name: name of the file in ``folder``.
        values: the JSON object to write.
        writer: rank that writes the file.
    """
    root = Root(folder.parent)
    temporary = f"{folder.name}/.{name}.{writer}.tmp"
    try:
        with root.create(temporary) as file:
            file.write(json.dumps(values).encode())
        root.rename(temporary, f"{folder.name}/{name}")
    except OSError as error:  # a full disk must not stop the training; the next save raises the error
        with contextlib.suppress(OSError):
            root.touch(f"{folder.name}/{name}")  # the launch script treats a rank with an old heartbeat as hung
        return error
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return parse_object(read_text(path))
    return {}


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: the text is not a JSON object, or is nested too deeply to parse.
    """
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def check(values: Mapping[str, Any], schema: Mapping[str, Check]) -> None:
    """Raise ValueError with the name of the first field of ``schema`` that is missing or fails its check."""
    for name, is_valid in schema.items():
        if name not in values or not is_valid(values[name]):
            raise ValueError(f"{name} is {shown(repr(values.get(name)), limit=60)}")


def integer(low: int, high: int) -> Check:
    """Return a check for integers in [low, high]. True and False fail the check."""
    return lambda value: type(value) is int and low <= value <= high


def number(low: float = -sys.float_info.max, high: float = sys.float_info.max) -> Check:
    """Return a check for numbers in [low, high]. NaN and infinity fail the check."""
    return lambda value: type(value) in (int, float) and low <= value <= high


def optional(of: Check) -> Check:
    """Return a check that accepts None, and all values that ``of`` accepts."""
    return lambda value: value is None or of(value)


def text(length: int) -> Check:
    """Return a check for strings of at most ``length`` characters."""
    return lambda value: isinstance(value, str) and len(value) <= length


def mapping(of: Check, size: int = 1000) -> Check:
    """Return a check for objects of at most ``size`` values that pass the check ``of``."""
    return lambda value: isinstance(value, dict) and len(value) <= size and all(map(of, value.values()))


def shown(value: object, limit: int = 80) -> str:
    """Return an untrusted value in a form that is safe to print in a message.

    The text cannot start a new line, control a terminal or flood a console.

    Args:
        value: any value; its ``str`` is shown.
        limit: maximum number of characters; a longer text is truncated and ends with "...".

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
    except ValueError:  # Python does not convert an int of more than 4,300 digits
        return f"a very long {type(value).__name__}"


def printable(line: str) -> str:
    """Replace each unprintable character, so that the line cannot control a terminal."""
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
