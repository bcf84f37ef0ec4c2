"""Record the events of a checked script's processes as JSON lines, in one file per process.

``samestep check`` puts this folder first on PYTHONPATH. A script that has no torch DataLoader needs an adapter, a file
that ``samestep check --adapter FILE`` runs at the start of each process. The adapter calls these functions:

* ``after_import(module, function)`` registers a function, which is called with the module once the module is imported.
* ``record_batch(indices)`` records the examples of the next step, for a script with a torch optimizer.
* ``record_step(indices, lr, loss)`` records a step of this rank, for a script with another optimizer.
* ``record_evaluation(indices, size)`` records all examples that this rank has used in one evaluation.

The modules ``samestep_record_files``, ``samestep_record_torch`` and ``samestep_record_batches`` contain the hooks.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.util
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any, Optional, TypeVar

config: dict[str, Any] = json.loads(os.environ.get("SAMESTEP_INSIDE") or "{}")
_RANKS = (
    "REPLICA_GROUP_ID",  # set by torchft, which has a rank 0 in each replica group
    "RANK",
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PADDLE_TRAINER_ID",
    "RANK_ID",
    "SLURM_PROCID",
)
_HERE = os.path.dirname(os.path.abspath(__file__))
_lock = threading.RLock()
_hooks: dict[str, list[Callable[[ModuleType], None]]] = {}
_unseen: set[str] = set()
_encode = json.JSONEncoder(check_circular=False).encode
_Identity = Optional[tuple[int, int]]  # device and inode of a file; None for a closed descriptor
_opened: tuple[int, int, _Identity] = (0, -1, None)  # PID, and descriptor and identity of this process's file


# --- what an adapter calls -------------------------------------------------------------------------------------------


def after_import(module: str, function: Callable[[ModuleType], None]) -> None:
    """Register a function that is called with the module of this name as soon as the script has imported the module."""
    record("awaited", module=module)
    _await_import(module, _of_adapter(module, function))


def record_batch(indices: Iterable[Any]) -> None:
    """Record the examples of this rank's next step, as numbers from 0 or other keys."""
    record("batch", number=None, loader=0, indices=_plain(indices), trains=True)


def record_step(indices: Iterable[Any] | None = None, lr: float | None = None, loss: float | None = None) -> None:
    """Record an optimizer step of this rank.

    Args:
        indices: the examples of this rank's shard, as numbers from 0 or other keys.
        lr: the learning rate of the step.
        loss: the mean loss over the global batch.
    """
    if indices is not None:
        record_batch(indices)
    rates = [] if lr is None else [float(lr)]
    record("step", lr=rates, loss=None if loss is None else float(loss))
    pause()


def record_evaluation(indices: Iterable[Any], size: int) -> None:
    """Record all examples that this rank has used in one evaluation of a dataset with ``size`` examples."""
    record("evaluated", indices=_plain(indices), size=size)


def _plain(indices: Iterable[Any]) -> list[Any]:
    return [each.item() if hasattr(each, "item") else each for each in indices]


# --- what the hooks call ---------------------------------------------------------------------------------------------


def record(event: str, **values: Any) -> None:
    """Append an event, as a JSON line, to the file of this process."""
    if not config:
        return
    place = {"rank": _rank(), "thread": threading.get_ident()}
    line = _encode({"event": event, "time": time.time(), **place, **values}) + "\n"
    with _lock:
        os.write(_descriptor(), line.encode())


def _descriptor() -> int:
    """Return the descriptor of this process's file. Open the file again after a fork, or if the script closed it."""
    global _opened
    process, descriptor, identity = _opened
    if process == os.getpid() and identity == _identity(descriptor):
        return descriptor
    path = os.path.join(config["records"], f"{os.getpid()}.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _opened = os.getpid(), descriptor, _identity(descriptor)
    return descriptor


def _identity(descriptor: int) -> _Identity:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def pause() -> None:
    """Sleep after a step, for the number of seconds that the check has configured."""
    seconds = config.get("pause", 0)
    if seconds:
        time.sleep(seconds)


def line() -> str | None:
    """Return ``file:line`` of the script's innermost frame, or None if no frame belongs to the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_script(path):
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache  # each step asks about the same files
def _is_script(path: str) -> bool:
    """Return whether a source file belongs to the script."""
    is_in_folder = path.startswith((config["work"], config["source"])) and "site-packages" not in path
    return is_in_folder and os.path.dirname(path) != _HERE


Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """Wrap a hook: the wrapper records the hook's first exception, and no exception reaches the script."""

    @functools.wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return hook(*arguments, **named)
        except Exception as error:
            name = hook.__qualname__
            if name not in _unseen:
                _unseen.add(name)
                record("unseen", hook=name, error=_words(error))
            return None

    return call  # type: ignore[return-value]


@guarded
def generators() -> dict[str, int]:
    """Return a checksum of each generator's state: ``random``, and ``torch``, ``cuda`` and ``numpy`` if in use."""
    found = {"random": hash(random.getstate()[1])}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):  # the function is missing while torch is being imported
        found["torch"] = zlib.crc32(torch.get_rng_state().numpy())
        if torch.cuda.is_initialized():
            found["cuda"] = zlib.crc32(torch.cuda.get_rng_state().numpy())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "get_state"):
        found["numpy"] = zlib.crc32(_state_of_numpy(numpy))
    return found


def _state_of_numpy(numpy: Any) -> bytes:
    """Return the state of numpy's global generator."""
    if hasattr(numpy, "get_bit_generator"):  # numpy 1.24 or newer
        source = numpy.get_bit_generator()
        if type(source).__name__ == "MT19937":
            # get_state() is 30 times as slow. The state in memory is an array of 624 integers, and a position.
            return ctypes.string_at(source.ctypes.state_address, 625 * 4)
    return repr(numpy.get_state(legacy=False)).encode()


def watch(
    owner: Any,
    name: str,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    failed: Callable[..., Any] | None = None,
) -> None:
    """Replace a function by a wrapper that also calls guarded hooks.

    Args:
        owner: the class or module that has the function.
        name: the function's name.
        before: hook that is called before the function, with the arguments.
        after: hook that is called after the function, with the result and the arguments.
        failed: hook that is called if the function raises an exception, with the exception and the arguments.
    """
    own = getattr(owner, name)
    before_call = guarded(before) if before else None
    after_call = guarded(after) if after else None
    failed_call = guarded(failed) if failed else None

    @functools.wraps(own)
    def watched(*arguments: Any, **named: Any) -> Any:
        if before_call:
            before_call(*arguments, **named)
        try:
            result = own(*arguments, **named)
        except BaseException as error:
            if failed_call:
                failed_call(error, *arguments, **named)
            raise
        if after_call:
            after_call(result, *arguments, **named)
        return result

    setattr(owner, name, watched)


def on_import(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Register a guarded hook that is called with the module of this name as soon as the script has imported it."""
    _await_import(module, guarded(hook))


def start() -> None:
    """Install the hooks, and run the adapter."""
    if not config:
        return
    # These imports are not at the top of the file, because both modules import this module.
    import samestep_record_files
    import samestep_record_torch

    record("start", covered=samestep_record_files.is_covered())
    samestep_record_files.start()
    samestep_record_torch.start()
    sys.meta_path.insert(0, _Finder())
    adapter = config.get("adapter")
    if adapter:
        _run_adapter(adapter)


def _run_adapter(path: str) -> None:
    names = {"__name__": "samestep_adapter", "__file__": path}
    try:
        with open(path) as file:
            code = compile(file.read(), path, "exec")
        exec(code, names)  # noqa: S102  # the user's file
    except Exception as error:
        record("adapter", error=_words(error))
        raise


def _of_adapter(module: str, function: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return a wrapper of an adapter's function that records the import and any exception."""

    def call(imported: ModuleType) -> None:
        record("imported", module=module)
        try:
            function(imported)
        except Exception as error:
            record("adapter", error=_words(error))
            raise

    return call


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _rank() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and getattr(distributed, "is_initialized", bool)():
        return int(distributed.get_rank())
    for name in _RANKS:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    # In mnist_elastic, only this variable contains the rank. This function parses the variable's JSON, because the
    # script's interpreter may lack `samestep.job_info`.
    rank: int | None = json.loads(os.environ.get("SAMESTEP_JOB_INFO") or "{}").get("rank")
    return rank


def _await_import(module: str, function: Callable[[ModuleType], None]) -> None:
    _hooks.setdefault(module, []).append(function)


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that calls the hooks of a module after the module's import."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in _hooks:
            return None
        functions = _hooks.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function in functions:
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
