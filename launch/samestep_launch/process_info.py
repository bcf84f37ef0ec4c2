"""Change the command and the environment that ``ps`` and /proc show for a forked process.

After a fork, both are copies of the parent's. The kernel reads them from the memory in which a process received them,
and the process may write there. This module uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOM_BYTES = 2048  # by which the environment's memory of a process that forks others is larger than needed
NAME_BYTES = 15  # of a thread's name, PR_SET_NAME in prctl(2)
_STAT_FIELDS_BEFORE_ARG_START = 45  # after the command's name, proc(5): 3 state, 48 arg_start, 49, 50, 51 env_end


def set_title(title: str) -> None:
    """Make ``title`` this process's command; it is cut to the length of the command that it replaces."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(title[:NAME_BYTES])
        start, end, _, _ = _areas()
        _write(start, end, title.encode()[: end - start - 1])


def show_environment(environ: Mapping[str, str], first: str = "SAMESTEP_") -> None:
    """Write ``environ`` to the place that /proc/<pid>/environ shows.

    Variables whose names begin with ``first`` come first. The last ones are left out if the memory is too small.
    """
    for name, value in environ.items():  # libc's pointers may refer to the memory that is written
        os.putenv(name, value)
    with contextlib.suppress(OSError):
        _, _, start, end = _areas()
        ordered = sorted(environ, key=lambda name: not name.startswith(first))
        _write(start, end, _pack((f"{name}={environ[name]}" for name in ordered), end - start))


def forget_launcher() -> None:
    """Remove this package's modules from those that are imported: a rank has loaded core alone, as exec starts it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "samestep_launch"]:
        del sys.modules[name]


def _pack(words: Iterable[str], size: int) -> bytes:
    """Return as many words as fit, each with a NUL at its end."""
    packed = b""
    for word in words:
        entry = os.fsencode(word) + b"\0"
        if len(packed) + len(entry) <= size:
            packed += entry
    return packed


def _areas() -> tuple[int, int, int, int]:
    """Return the begin and end of the command's memory, and of the environment's. Raises OSError if unknown."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = _STAT_FIELDS_BEFORE_ARG_START
    arg_start, arg_end, env_start, env_end = map(int, fields[first : first + 4])
    if not 0 < arg_start < arg_end <= env_start <= env_end:
        raise OSError("the kernel does not show where the command is")
    return arg_start, arg_end, env_start, env_end


def _write(start: int, end: int, content: bytes) -> None:
    """Write to this process's memory, with NULs up to its end. A wrong address raises OSError."""
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(content.ljust(end - start, b"\0"))
