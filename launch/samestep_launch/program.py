"""Import a training program once, so that each rank can be forked from the process that has imported it.

A forked rank runs the program's ``if __name__ == "__main__":`` block, or the function ``main`` if the program lacks
this block. During the import, the program's ``__name__`` is ``__mp_main__``, as in a process that multiprocessing
spawns. This module imports no third-party package.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any, NoReturn

from samestep import ConfigError

IMPORTED = "__mp_main__"
STARTED = "__main__"
_FILE: Any = io.IOBase.__base__  # base class of all files, of Python's own and of a program's
# numpy's import starts OpenBLAS's threads, and a process with threads cannot fork ranks. OPENBLAS_NUM_THREADS does
# not change torch's number of threads. If torch counts GPUs through CUDA instead of NVML, forked processes cannot use
# CUDA.
IMPORT_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class _Left(BaseException):
    """The program called os._exit(0) in its main thread."""


class ImportFailed(Exception):
    """The program's import raised an exception. ``exit_code`` is Python's exit code for the exception, or 1 for 0."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Program:
    """A program that this process imports and that forked processes run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._module = ModuleType(IMPORTED)
        self._block: CodeType | None = None

    def load(self, arguments: Sequence[str]) -> None:
        """Import the program as this process's ``__main__``, with the program's command line in ``sys.argv``.

        Raises:
            ImportFailed: the program raised an exception, which this method has printed.
        """
        self._replaced_main = sys.modules[STARTED]  # this reference keeps the module and its variables alive
        sys.argv[:] = [str(self.path), *arguments]
        sys.path[0] = str(self.path.parent)
        vars(self._module)["__file__"] = str(self.path)
        sys.modules[IMPORTED] = self._module
        sys.modules[STARTED] = self._module
        try:
            tree = ast.parse(self.path.read_bytes(), str(self.path))
            self._block = _compile([node for node in tree.body if _is_main_block(node)], self.path)
            exec(compile(tree, str(self.path), "exec", dont_inherit=True), vars(self._module))  # noqa: S102
        except BaseException as problem:
            code = exit_code(problem)
            last = traceback.format_exception_only(type(problem), problem)[-1].strip()
            raise ImportFailed(f"{self.path.name} failed at its import: {last}", code or 1) from None

    def run(self, arguments: Sequence[str]) -> int:
        """Run the program in this forked process, and return the code with which Python would exit.

        If the program calls ``os._exit(0)`` in the main thread, this method returns 0, because the agent waits for the
        result of each rank.
        """
        names = vars(self._module)
        inherited = _files(gc.get_objects())  # files of this package, which the program does not write
        names["__name__"] = STARTED
        _name_as_started(names)
        sys.argv[1:] = arguments
        code = 0
        with _leaving_returns() as has_left:
            try:
                if self._block:
                    exec(self._block, names)  # noqa: S102
                else:
                    names["main"]()
            except _Left:
                pass
            except BaseException as problem:
                code = exit_code(problem)
        if has_left:
            return 0
        _finish(names, inherited)
        return code


def check(path: Path) -> None:
    """Raise ConfigError if a program has neither a ``__main__`` block nor a function ``main``."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return  # Python reports the error when the program starts
    if not any(_is_main_block(node) or "main" in _names(node) for node in body):
        remedy = "define one for --start-method fork, or use --start-method exec"
        raise ConfigError(f"PROGRAM {path.name} has no function main(): {remedy}")


def exit_code(problem: BaseException) -> int:
    """Return Python's exit code for an exception that ends a program, and print the exception as Python does."""
    if isinstance(problem, SystemExit):
        if problem.code is None or isinstance(problem.code, int):
            return (problem.code or 0) & 0xFF
        print(problem.code, file=sys.stderr)
        return 1
    sys.excepthook(type(problem), problem, _without_launcher(problem.__traceback__))
    return 130 if isinstance(problem, KeyboardInterrupt) else 1


def _without_launcher(frames: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _is_main_block(node: ast.stmt) -> bool:
    """Return whether a statement is ``if __name__ == "__main__":``."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
        return False
    sides: list[Any] = [node.test.left, *node.test.comparators]
    words = {getattr(side, "id", None) or getattr(side, "value", None) for side in sides}
    return isinstance(node.test.ops[0], ast.Eq) and words == {"__name__", STARTED}


def _names(node: ast.stmt) -> list[str]:
    """Return the names that a ``def`` or ``from ... import`` statement defines; [] for other statements."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    return [each.asname or each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []


def _compile(body: list[ast.stmt], path: Path) -> CodeType | None:
    return compile(ast.Module(body, []), str(path), "exec", dont_inherit=True) if body else None


def _name_as_started(names: Mapping[str, Any]) -> None:
    """Set the module of the program's classes and functions to ``__main__``, the name in a pickle by another start."""
    for value in names.values():
        if isinstance(value, (type, FunctionType)) and value.__module__ == IMPORTED:
            value.__module__ = STARTED
            _name_as_started(dict(vars(value)))


@contextlib.contextmanager
def _leaving_returns() -> Iterator[list[bool]]:
    """Turn ``os._exit(0)`` in this process's main thread into the exception `_Left`, except in forked processes.

    The yielded list is empty until then. The program may catch the exception, and then call ``os._exit`` again.
    """
    leave = os._exit
    pid = os.getpid()
    has_left: list[bool] = []

    def leave_or_return(status: int) -> NoReturn:
        is_rank = os.getpid() == pid and threading.current_thread() is threading.main_thread()
        if is_rank and (status == 0 or has_left):
            has_left.append(True)
            raise _Left
        leave(status)

    os._exit = leave_or_return
    try:
        yield has_left
    finally:
        os._exit = leave


def _finish(names: Mapping[str, Any], inherited: list[Any]) -> None:
    """Wait for the program's threads and write the contents of its open files, as Python does when a program ends.

    Args:
        names: the variables of the program. A file that it opened before the fork must be one of them.
        inherited: other files that this process had after the fork.
    """
    with contextlib.suppress(BaseException):  # Python also ends after Ctrl-C here
        threading._shutdown()  # type: ignore[attr-defined]  # also ends the threads of executors
    ignored = {id(each) for each in inherited}
    opened = [each for each in _files(gc.get_objects()) if id(each) not in ignored]
    files = [*opened, *_files(names.values())]
    # A text file may write into a compressed file, which writes its end into another file when it is closed.
    _flush(files)
    for each in files:
        if isinstance(each, io.BufferedIOBase) and type(each).__module__ != "_io":
            with contextlib.suppress(Exception):  # Python ignores such an exception too
                each.close()
    _flush(files)


def _files(objects: Iterable[Any]) -> list[Any]:
    """Return the files among the objects, without the standard streams."""
    streams = {id(each) for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    return [each for each in objects if issubclass(type(each), _FILE) and id(each) not in streams]


def _flush(files: Iterable[Any]) -> None:
    for each in files:
        with contextlib.suppress(Exception):  # Python ignores such an exception too
            each.flush()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Set IMPORT_VARIABLES inside this context, so that this process can fork ranks after its imports.

    Garbage collection is off inside the context, because it would take a fifth of the time of the imports. Imported
    objects are never collected, because a collection in a rank would copy their memory.
    """
    before = {name: os.environ[name] for name in IMPORT_VARIABLES if name in os.environ}
    os.environ.update(IMPORT_VARIABLES)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in IMPORT_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)


def threads() -> int:
    """Return how many threads this process has, including threads that libraries started."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()
