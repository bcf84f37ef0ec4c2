"""Find the batches that an optimizer step trains on.

The recorder marks all tensors of a batch with the batch's number. If an outermost module, or a torch function outside
of modules, is called, the recorder also marks the outputs with the numbers of the inputs. Hooks on the nodes of the
autograd graph record the numbers that a backward pass reaches. The optimizer's next step trains on these batches.
"""

from __future__ import annotations

import functools
import os
import weakref
from types import FunctionType
from typing import Any

import torch
from samestep_record import guarded, record, watch
from samestep_record_torch import joint_norm, note_precision, persistent_buffers
from torch.overrides import TorchFunctionMode

MOST_TENSORS = 64  # maximum number of items that are searched in one container or object
MOST_DEPTH = 4  # maximum number of levels of nested containers that are searched
_NAME = "samestep_batches"  # key of the batch numbers in a graph node's metadata
_IN_PLACE = {"__setitem__", "set_"}
_SCALARS = {type(None), bool, int, float, str, bytes}

_numbers: dict[int, tuple[weakref.ref[Any], frozenset[int]]] = {}
_counted: set[int] = set()  # numbers of the batches that a step has trained on
_reached: list[int] = []  # batch numbers that backward passes reached, in order
_first: dict[int, int] = {}  # by optimizer id: index in _reached of the current gradients' first batch
_is_in_module = False  # whether a module call is running; in a forked process, always true
_modules: weakref.WeakSet[Any] = weakref.WeakSet()  # modules called with gradients enabled
_recorded: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()  # see `_record_call`


def tensors(value: Any) -> list[Any]:
    """Return the tensors in a value, in nested containers and in attributes of objects, down to level `MOST_DEPTH`."""
    found: list[Any] = []
    _collect(value, found, 0)
    return found


def _collect(value: Any, found: list[Any], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) not in _SCALARS and depth < MOST_DEPTH:
        for each in _content(value)[:MOST_TENSORS]:
            _collect(each, found, depth + 1)


def _content(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, (list, tuple)):
        return [*value]
    if isinstance(value, (str, bytes, type, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values()]


def mark(value: Any, number: int) -> None:
    """Mark all tensors of a batch with the batch's number."""
    for tensor in tensors(value):
        _add(tensor, frozenset([number]))


def _of(value: Any) -> frozenset[int]:
    """Return the batch numbers of a value's tensors, without the batches that a step has trained on."""
    found: frozenset[int] = frozenset()
    for tensor in tensors(value):
        entry = _numbers.get(id(tensor))
        if entry is not None:
            found |= entry[1]
    return found - _counted if found else found


def _add(tensor: Any, numbers: frozenset[int]) -> None:
    key = id(tensor)
    entry = _numbers.get(key)
    if entry is None:
        reference = weakref.ref(tensor, lambda _: _numbers.pop(key, None))
    else:
        reference = entry[0]
        numbers |= entry[1]
    _numbers[key] = (reference, numbers)
    node = tensor.grad_fn
    if node is not None:
        _watch_node(node, numbers)


def _watch_node(node: Any, numbers: frozenset[int]) -> None:
    metadata = node.metadata
    if _NAME in metadata:
        metadata[_NAME].update(numbers)
        return
    found = metadata[_NAME] = set(numbers)

    def reach(_: Any) -> None:
        _reached.extend(found)

    node.register_prehook(reach)


def _pass_on(inputs: Any, outputs: Any) -> None:
    numbers = _of(inputs)
    if numbers:
        for tensor in tensors(outputs):
            _add(tensor, numbers)


def _changes_first(function: Any) -> bool:
    """Return whether a torch function changes its first argument in place."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class _Follow(TorchFunctionMode):
    """Pass batch numbers from inputs to outputs of torch functions that run outside of modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_outside():
            self.follow(func, args, kwargs, result)
        return result

    @staticmethod
    @guarded
    def follow(function: Any, arguments: Any, named: Any, result: Any) -> None:
        given = [arguments, named] if named else arguments
        _pass_on(given, result)
        if _changes_first(function) and arguments:
            _pass_on(given, arguments[0])


def _is_outside() -> bool:
    """Return whether no module call, compilation or backward pass is running."""
    return not torch.compiler.is_compiling() and not _is_in_module and not _in_backward()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_mode = _Follow()
_process: int | None = None  # PID of the process that follows batches; None before the first batch


def follow() -> None:
    """Start to pass batch numbers through torch functions and modules. Later calls have no effect."""
    global _process
    if _process is not None:
        return
    _process = os.getpid()
    _watch_modules()
    _mode.__enter__()  # type: ignore[no-untyped-call]
    os.register_at_fork(after_in_child=_leave)


def _leave() -> None:
    """Stop following batches in a forked process, such as a loader's worker."""
    global _is_in_module
    _is_in_module = True


def _watch_modules() -> None:
    call = torch.nn.Module.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _is_in_module
        if not _is_outside():
            return call(self, *args, **kwargs)
        is_suspended = suspend()
        _is_in_module = True
        try:
            result = call(self, *args, **kwargs)
            _after_module(self, (args, kwargs), result)
        finally:
            _is_in_module = False
            resume(is_suspended)
        return result

    torch.nn.Module.__call__ = watched  # type: ignore[method-assign]
    watch(torch.nn.Module, "zero_grad", after=_forget_all)


def watch_compiler(module: Any) -> None:
    """Pass batch numbers through calls of compiled functions. `_watch_modules` covers compiled modules."""
    compile_by = module._TorchDynamoContext.__call__
    pass_on = guarded(_pass_on)

    def watched(context: Any, function: Any) -> Any:
        compiled = compile_by(context, function)
        if not isinstance(function, FunctionType):
            return compiled

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            if _is_outside():
                pass_on((args, kwargs), result)
            return result

        return call

    module._TorchDynamoContext.__call__ = watched


def suspend() -> bool:
    """Remove `_mode`, because each torch function is slower with it. Then call `resume` with the result.

    Returns:
        Whether `_mode` was removed. It stays if it is not the innermost mode.
    """
    count = torch._C._len_torch_function_stack()
    if count == 0 or torch._C._get_function_stack_at(count - 1) is not _mode:
        return False
    torch.overrides._pop_mode()
    return True


def resume(is_suspended: bool) -> None:
    """Install `_mode` again.

    Args:
        is_suspended: the result of `suspend`.
    """
    if is_suspended:
        torch.overrides._push_mode(_mode)


@guarded
def _after_module(module: Any, inputs: Any, outputs: Any) -> None:
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters())
    if torch.is_grad_enabled() and module not in _modules:
        _modules.add(module)
        for each in module.parameters():
            note_precision(each.dtype)
    if not is_trained:
        _record_call(module)
    _pass_on(inputs, outputs)


def _record_call(module: Any) -> None:
    """Record the norms of weights and buffers of a module called without gradients, once per version of the values.

    A change through ``.data`` keeps the version of a tensor, so each step also begins a new version.
    """
    buffers: list[Any] = []
    for part in module.modules():
        buffers += persistent_buffers(part).values()
    parts = {"weights": [*module.parameters()], "buffers": buffers}
    version = 0
    for values in parts.values():
        version += sum(0 if each.is_inference() else each._version for each in values)
    newest = version, len(_counted)
    if _recorded.get(module) == newest:
        return
    _recorded[module] = newest
    for part, values in parts.items():
        numbers = [each for each in values if each.is_floating_point()]  # integer counters would dominate the norm
        if numbers:
            record("called", name=f"{part} of {type(module).__name__}", norm=joint_norm(numbers))


def forget(optimizer: Any) -> None:
    """Forget the batches of an optimizer's gradients, at the optimizer's creation and at each zero_grad."""
    _first[id(optimizer)] = len(_reached)


def _forget_all(*_: Any, **__: Any) -> None:
    """Forget the batches of all gradients, at a module's zero_grad."""
    _reached.clear()
    _first.clear()


def take(optimizer: Any) -> list[int]:
    """Return the numbers of new batches that backward passes reached since the optimizer's last step or zero_grad."""
    new = set(_reached[_first.get(id(optimizer), 0) :]) - _counted
    _counted.update(new)
    _first[id(optimizer)] = len(_reached)
    return sorted(new)


def training_modules() -> list[Any]:
    """Return the modules that the script called directly, with gradients enabled."""
    return [*_modules]
