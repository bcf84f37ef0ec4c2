"""Find out where in its code a rank is."""

from __future__ import annotations

import gc
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from samestep.untrusted import shown

MAX_CODE_LENGTH = 70  # characters of a line of code in a message
MAX_SOURCE = 2**23  # bytes of a source file whose lines are shown: another program may have named the file

_MAIN = getattr(sys.modules["__main__"], "__file__", None)
PROGRAM = Path(_MAIN).absolute().parent if _MAIN else Path(os.devnull)
_PACKAGE = f"{Path(__file__).absolute().parents[1]}{os.sep}"
_COLLECTIVES = re.compile(r"/(horovod|distributed|communication)/")  # folders of frameworks' modules of collectives

_reading_frames = threading.Lock()


class CodeLocation(NamedTuple):
    """A file, a line and a function in which a thread is; ``code`` is the line's text, or "" if it was not read."""

    file: str
    line: int
    function: str
    code: str = ""

    def with_code(self) -> CodeLocation:
        """Return the location with the text of its line; "" if the file cannot be read, or is not source code."""
        if self.code or not self._is_source():
            return self
        return self._replace(code=linecache.getline(self.file, self.line).strip())

    def _is_source(self) -> bool:
        if not (self.file.endswith(".py") and os.path.isfile(self.file)):
            return False
        return os.path.getsize(self.file) < MAX_SOURCE

    def __str__(self) -> str:
        place = f"{shown(os.path.basename(self.file))}:{self.line} in {shown(self.function)}"
        code = re.sub(r"\s*#.*", "", self.code)
        if not code:
            return place
        if len(code) > MAX_CODE_LENGTH:
            code = f"{code[: MAX_CODE_LENGTH - 3]}..."
        return f"{place} ({code})"


def current_frames() -> dict[int, FrameType]:
    """Return each thread's frame, without a garbage collection meanwhile.

    Before Python 3.11.9 a collection in `sys._current_frames` may hang the process: it holds the lock of all threads'
    states while a finalizer gives up the interpreter's lock (https://github.com/python/cpython/issues/106883).
    """
    with _reading_frames:
        was_enabled = gc.isenabled()
        gc.disable()
        frames = sys._current_frames()
        if was_enabled:
            gc.enable()
        return frames


def stack(frame: FrameType | None) -> list[CodeLocation]:
    """Return the calls of a thread, the innermost first."""
    calls = []
    for call, line in traceback.walk_stack(frame):
        calls.append(CodeLocation(call.f_code.co_filename, line, function=call.f_code.co_name))
    return calls


def own_location(calls: Sequence[CodeLocation], program: Path = PROGRAM) -> CodeLocation:
    """Return the innermost of one or more ``calls`` in the folder ``program``, else in this package, else of all."""
    folder = f"{program}{os.sep}"
    in_package = [call for call in calls if call.file.startswith(_PACKAGE)]
    in_folder = [call for call in calls if call.file.startswith(folder) and not call.file.startswith(_PACKAGE)]
    in_program = [call for call in in_folder if "site-packages" not in call.file[len(folder) :]]
    return (in_program or in_package or calls)[0]


def is_in_collective(calls: Sequence[CodeLocation], program: Path = PROGRAM) -> bool:
    """Return whether the own code of a thread has called into a framework's module of collectives."""
    inner = calls[: calls.index(own_location(calls, program))]
    files = [call.file.rpartition("-packages")[2] for call in inner if not call.file.startswith(_PACKAGE)]
    return any(_COLLECTIVES.search(file) for file in files)
