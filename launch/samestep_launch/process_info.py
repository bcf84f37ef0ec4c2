"""Change the command and the environment that ``ps`` and /proc show for a forked process.

A forked process at first shows the parent's command and environment. The kernel reads command and environment from the
process's memory, which the process may overwrite. This module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOM_BYTES = 2048  # bytes of spare memory in a fork server's environment, for the longer environments of its ranks
NAME_BYTES = 15  # maximum length of a thread's name: PR_SET_NAME in prctl(2)
_STAT_FIELDS_BEFORE_ARG_START = 45  # fields 3 to 47 of proc(5); arg_start to env_end are fields 48 to 51


def set_title(title: str) -> None:
    """Replace this process's command by ``title``, truncated to the length of the old command."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(title[:NAME_BYTES])
        start, end, _, _ = _areas()
        _write(start, end, title.encode()[: end - start - 1])


def show_environment(environ: Mapping[str, str], first: str = "SAMESTEP_") -> None:
    """Write ``environ`` to the memory that /proc/<pid>/environ shows.

    Variables whose names begin with ``first`` come first. Variables that do not fit are left out.
    """
    for name, value in environ.items():  # putenv copies a variable that libc may keep in the overwritten memory
        os.putenv(name, value)
    with contextlib.suppress(OSError):
        _, _, start, end = _areas()
        ordered = sorted(environ, key=lambda name: not name.startswith(first))
        _write(start, end, _pack((f"{name}={environ[name]}" for name in ordered), end - start))


def forget_launcher() -> None:
    """Remove this package from ``sys.modules``, as in a rank that starts as a program without this package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "samestep_launch"]:
        del sys.modules[name]


def _pack(words: Iterable[str], size: int) -> bytes:
    """Return the words that fit into ``size`` bytes, each with a NUL at its end."""
    packed = b""
    for word in words:
        entry = os.fsencode(word) + b"\0"
        if len(packed) + len(entry) <= size:
            packed += entry
    return packed


def _areas() -> tuple[int, int, int, int]:
    """Return arg_start, arg_end, env_start and env_end of proc(5).

    Raises:
        OSError: the kernel does not expose these addresses.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = _STAT_FIELDS_BEFORE_ARG_START
    arg_start, arg_end, env_start, env_end = map(int, fields[first : first + 4])
    if not 0 < arg_start < arg_end <= env_start <= env_end:
        raise OSError("the kernel does not show where the command is")
    return arg_start, arg_end, env_start, env_end


def _write(start: int, end: int, content: bytes) -> None:
    """Write ``content`` to this process's memory at ``start``, and fill the rest up to ``end`` with NULs.

    Raises:
        OSError: the address is invalid.
    """
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(content.ljust(end - start, b"\0"))
