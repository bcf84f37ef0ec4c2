"""Find the code location of a rank's threads."""

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

MAX_CODE_LENGTH = 70  # maximum characters of a line of code in a message
MAX_SOURCE = 2**23  # maximum bytes of a source file to read; another program may have chosen the file's name

_MAIN = getattr(sys.modules["__main__"], "__file__", None)
PROGRAM = Path(_MAIN).absolute().parent if _MAIN else Path(os.devnull)
_PACKAGE = f"{Path(__file__).absolute().parents[1]}{os.sep}"
_COLLECTIVES = re.compile(r"/(horovod|distributed|communication)/")  # folders of the frameworks' collectives

_reading_frames = threading.Lock()


class CodeLocation(NamedTuple):
    """A thread's location in the code.

    Attributes:
        file: path of the source file.
        line: number of the line, from 1.
        function: name of the function.
        code: text of the line; "" if it was not read.
    """

    file: str
    line: int
    function: str
    code: str = ""

    def with_code(self) -> CodeLocation:
        """Return the location with the text of its line, or with "" if the source file cannot be read."""
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


def stacks(thread: int | None = None) -> dict[int, list[CodeLocation]]:
    """Return the locations of each thread's calls by thread id, the innermost first, or of only one thread.

    Garbage collection is disabled until all frames are read. Otherwise a collection may begin in this thread, and a
    finalizer may release the GIL. Before Python 3.11.9, `sys._current_frames` then deadlocks, because it holds the lock
    of all thread states (https://github.com/python/cpython/issues/106883). And while ``f_back`` creates a frame object,
    the other thread may free the frame itself, which ended healthy ranks with SIGSEGV in Python 3.11.7.

    Args:
        thread: the id of the thread to read; None for all threads.
    """
    with _reading_frames:
        was_enabled = gc.isenabled()
        gc.disable()
        frames: dict[int, FrameType] = {}
        try:
            frames = sys._current_frames()
            return {ident: _calls(frame) for ident, frame in frames.items() if thread in (None, ident)}
        finally:
            # One of the frames is this function's own frame, which owns the dictionary. Without this line, this cycle
            # would keep all threads' local variables, such as activations, until a garbage collection.
            frames.clear()
            if was_enabled:
                gc.enable()


def _calls(frame: FrameType) -> list[CodeLocation]:
    calls = []
    for call, line in traceback.walk_stack(frame):
        calls.append(CodeLocation(call.f_code.co_filename, line, function=call.f_code.co_name))
    return calls


def own_location(calls: Sequence[CodeLocation], program: Path = PROGRAM) -> CodeLocation:
    """Return the innermost call whose file is in the folder ``program``, else in this package, else anywhere.

    Args:
        calls: one or more calls of a thread, the innermost first.
        program: folder of the program.
    """
    folder = f"{program}{os.sep}"
    in_package = [call for call in calls if call.file.startswith(_PACKAGE)]
    in_folder = [call for call in calls if call.file.startswith(folder) and not call.file.startswith(_PACKAGE)]
    in_program = [call for call in in_folder if "site-packages" not in call.file[len(folder) :]]
    return (in_program or in_package or calls)[0]


def is_in_collective(calls: Sequence[CodeLocation], program: Path = PROGRAM) -> bool:
    """Return whether a thread is inside a framework's collective that the program or this package has called.

    Args:
        calls: the thread's calls, the innermost first.
        program: folder of the program.
    """
    inner = calls[: calls.index(own_location(calls, program))]
    files = [call.file.rpartition("-packages")[2] for call in inner if not call.file.startswith(_PACKAGE)]
    return any(_COLLECTIVES.search(file) for file in files)
