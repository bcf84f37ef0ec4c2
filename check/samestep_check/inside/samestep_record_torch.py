"""Record the batches of DataLoaders, and the steps and state of torch's optimizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from samestep_record import generators, guarded, line, on_import, pause, record, watch

MOST_ELEMENTS = 1 << 20  # approximate maximum number of elements that one call of _norms reads
_optimizers: dict[int, int] = {}  # by id: number of the optimizer in the order of creation
_numbers_of_optimizers = itertools.count(1)
_loaders = itertools.count(1)
_batches = itertools.count(1)
_stepping: FrameType | None = None  # frame of the outermost running step()
_is_initializing = False  # whether torch.distributed.checkpoint creates an optimizer's state by a step
_before: dict[str, Any] = {}
_broadcast: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose buffers DistributedDataParallel broadcasts
_newest_loader = 0
_dropped_in = 0  # number of the loader whose padding was recorded last
_dtypes: set[Any] = set()  # types of weights and of autocast that were recorded
_scale: float | None = None  # newest scale of a GradScaler
_at_fetch: dict[str, int] = {}  # generators of this process, a loader's worker, at the begin of its newest fetch
_has_drawn = False  # whether this process, a loader's worker, has drawn random numbers in a fetch


def start() -> None:
    """Register hooks that run when the script imports modules of torch, Accelerate or samestep.torch."""
    on_import("torch.utils.data.dataloader", _watch_loaders)
    on_import("torch.optim.optimizer", _watch_optimizers)
    on_import("torch.distributed.checkpoint.state_dict", _watch_initialization)
    on_import("torch._dynamo.eval_frame", _watch_compiler)
    on_import("torch.amp.grad_scaler", _watch_scaler)
    on_import("accelerate.accelerator", _watch_accelerator)
    on_import("samestep.torch", _watch_parts)
    on_import("torch.distributed.distributed_c10d", _watch_groups)
    on_import("torch.nn.parallel.distributed", _watch_replicas)
    on_import("torch.amp.autocast_mode", _watch_autocast)


def _watch_compiler(module: ModuleType) -> None:
    import samestep_record_batches  # a late import, because samestep_record_batches imports torch

    samestep_record_batches.watch_compiler(module)


# --- batches ---------------------------------------------------------------------------------------------------------


def _watch_loaders(module: ModuleType) -> None:
    iterator = module._BaseDataLoaderIter
    watch(iterator, "__init__", before=_begin)
    watch(iterator, "_reset", before=_begin)
    watch(iterator, "_next_index", after=_asked)
    watch(iterator, "__next__", before=_follow, after=_returned, failed=_ended)
    watch(module._utils.worker, "_worker_loop", before=_begin_worker)


def _begin_worker(_: Any, dataset: Any, *__: Any, **___: Any) -> None:
    """Watch the fetches of a loader's worker.

    `samestep.torch.Seeded` is not watched, because it draws the same numbers for an example in any worker.
    """
    if type(dataset).__module__.startswith("samestep."):
        return
    fetch = sys.modules["torch.utils.data._utils.fetch"]
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        watch(fetcher, "fetch", before=_before_fetch, after=_after_fetch)


def _before_fetch(*_: Any) -> None:
    global _at_fetch
    if not _has_drawn:
        _at_fetch = generators() or {}


def _after_fetch(*_: Any) -> None:
    """Record that this worker draws random numbers, once."""
    global _has_drawn
    if _has_drawn:
        return
    states = generators() or {}
    if any(states.get(name) != state for name, state in _at_fetch.items()):
        _has_drawn = True
        record("draws")


def _begin(iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
    global _newest_loader
    number = next(_loaders)
    _newest_loader = number
    iterator._samestep = number, deque()
    dataset = loader.dataset
    workers = getattr(loader, "num_workers", 0)
    record(
        "iterate",
        loader=number,
        size=_size(dataset),
        batches=_size(loader),
        subsets=_subsets(dataset),
        workers=workers,
        random=generators(),
    )
    weakref.finalize(iterator, record, "gone", loader=number).atexit = False


def _asked(indices: Any, iterator: Any) -> None:
    iterator._samestep[1].append(indices)


def _follow(iterator: Any) -> None:
    import samestep_record_batches  # a late import, because samestep_record_batches imports torch

    samestep_record_batches.follow()
    # An IterableDataset may compute its examples from the batches of another loader.
    is_stream = isinstance(iterator._dataset, sys.modules["torch.utils.data"].IterableDataset)
    iterator._samestep_suspended = not is_stream and samestep_record_batches.suspend()


def _returned(batch: Any, iterator: Any) -> None:
    try:
        _record_batch(batch, iterator)
    finally:
        sys.modules["samestep_record_batches"].resume(iterator._samestep_suspended)


def _record_batch(batch: Any, iterator: Any) -> None:
    loader, asked = iterator._samestep
    number = next(_batches)
    indices = None
    reason = "it has no indices"
    if asked:
        indices, reason = _examples(iterator._dataset, asked.popleft())
    trains = sys.modules["torch"].is_grad_enabled()
    record("batch", number=number, loader=loader, indices=indices, reason=reason, trains=trains)
    if trains:
        sys.modules["samestep_record_batches"].mark(batch, number)


def _ended(error: BaseException, iterator: Any) -> None:
    sys.modules["samestep_record_batches"].resume(iterator._samestep_suspended)
    if isinstance(error, StopIteration):
        record("end", loader=iterator._samestep[0])


def _size(values: Any) -> int | None:
    _, innermost = _open(values)
    try:
        return len(innermost)
    except Exception:  # an IterableDataset has no length, and a script's own __len__ may raise anything
        return None


def _open(dataset: Any) -> tuple[list[Any], Any]:
    """Return the Subsets around a dataset, the outermost first, and the dataset inside them."""
    subsets = []
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        # A wrapper such as samestep.torch.Seeded forwards the attributes of its Subset, and does not change indices.
        if inspect.getattr_static(dataset, "indices", None) is not None:
            subsets.append(dataset)
        dataset = dataset.dataset
    return subsets, dataset


def _subsets(dataset: Any) -> list[list[int]]:
    """Return the length and a checksum of the indices of each Subset around the dataset, the outermost first."""
    found = []
    subsets, _ = _open(dataset)
    for each in subsets:
        keys = [_key(index) for index in each.indices]
        found.append([len(keys), zlib.crc32(repr(keys).encode())])
    return found


def _examples(dataset: Any, batch: Any) -> tuple[list[Any] | None, str]:
    """Return the keys of a batch's examples in the innermost dataset and "", or None and why an example has no key."""
    if hasattr(batch, "tolist"):  # some samplers yield a batch's indices as an array or a tensor
        batch = batch.tolist()
    keys = batch if isinstance(batch, list) else [batch]
    subsets, _ = _open(dataset)
    for each in subsets:
        keys = [each.indices[key] for key in keys]
    if set(map(type, keys)) == {int}:  # most scripts; the general way takes microseconds per example
        return keys, ""
    try:
        return [_key(key) for key in keys], ""
    except TypeError as error:
        return None, str(error)


def _key(value: Any) -> Any:
    """Return an example's key as a JSON value: null, a boolean, a number, a string or a list of keys.

    Raises:
        TypeError: the key's text may differ between two runs.
    """
    if type(value) is int or value is None or isinstance(value, (bool, float, str)):
        return value
    if hasattr(value, "__index__"):  # an int, a numpy integer, or a tensor of one integer
        return int(value)
    if isinstance(value, (list, tuple)):
        return [_key(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_key(getattr(value, field.name)) for field in dataclasses.fields(value)]
    text = repr(value)
    has_own_text = vars(object)["__repr__"] is not type(value).__repr__
    is_stable = has_own_text and type(value).__hash__ is not None
    if not is_stable:
        raise TypeError(f"a key of type {type(value).__name__} is not the same in two runs")
    return text


# --- steps -----------------------------------------------------------------------------------------------------------


def _watch_optimizers(module: ModuleType) -> None:
    watch(module.Optimizer, "__init__", after=_created)
    watch(module.Optimizer, "zero_grad", after=_zeroed)
    module.Optimizer.zero_grad = _without_following(module.Optimizer.zero_grad)
    wrap = module.Optimizer.profile_hook_step  # torch calls this function once for each class of optimizers
    module.Optimizer.profile_hook_step = staticmethod(lambda step: _without_following(wrap(step)))
    module.register_optimizer_step_pre_hook(_step_begins)
    module.register_optimizer_step_post_hook(_step_ends)


def _watch_initialization(module: ModuleType) -> None:
    """Ignore the steps by which torch.distributed.checkpoint creates an optimizer's state, without gradients."""

    def begin(*_: Any) -> None:
        global _is_initializing
        _is_initializing = True

    def end(*_: Any) -> None:
        global _is_initializing
        _is_initializing = False

    watch(module, "_init_optim_state", before=begin, after=end, failed=end)


def _created(_: None, optimizer: Any, *__: Any, **___: Any) -> None:
    _number(optimizer)
    _zeroed(None, optimizer)


def _number(optimizer: Any) -> int:
    """Return the number of an optimizer, from 1 in the order of creation."""
    key = id(optimizer)
    if key not in _optimizers:
        _optimizers[key] = next(_numbers_of_optimizers)
        weakref.finalize(optimizer, _optimizers.pop, key, None).atexit = False
    return _optimizers[key]


def _zeroed(_: None, optimizer: Any, *__: Any, **___: Any) -> None:
    batches = sys.modules.get("samestep_record_batches")
    if batches is not None:
        batches.forget(optimizer)


def _without_following(method: Any) -> Any:
    """Return an optimizer's method that follows no batches, because it calls torch functions for each parameter."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        batches = sys.modules.get("samestep_record_batches")
        has_closure = any(callable(each) for each in (*arguments[1:], *named.values()))  # it computes a loss
        if batches is None or has_closure or sys.modules["torch"].compiler.is_compiling():
            return method(*arguments, **named)
        is_suspended = batches.suspend()
        try:
            return method(*arguments, **named)
        finally:
            batches.resume(is_suspended)

    return call


def _step_begins(optimizer: Any, *_: Any) -> None:
    global _stepping
    if _is_initializing:
        return
    caller = sys._getframe(1)  # frame of step(), which also calls _step_ends
    frame: FrameType | None = caller
    while frame is not None and frame is not _stepping:
        frame = frame.f_back
    # Horovod's step() calls another step(), which must not count as a step. If a step() raises an exception, _step_ends
    # does not run, so _stepping may be a frame that has ended.
    if frame is None:
        _stepping = caller
        _before.clear()
        _describe(optimizer)


def _step_ends(optimizer: Any, *_: Any) -> None:
    global _stepping
    if sys._getframe(1) is not _stepping:
        return
    _stepping = None
    _record_step(optimizer)
    pause()


@guarded
def _describe(optimizer: Any) -> None:
    """Note the settings, the generators, and the norms of weights, state and buffers before a step."""
    _before["settings"] = _settings(optimizer)
    _before["random"] = generators()
    weights = _parameters(optimizer)
    groups = {**_state(optimizer), **_buffers()}
    of_weights, *others = _norms(weights, *groups.values())
    _before["weights_before"] = _whole_norm(weights, of_weights)
    _before["state"] = {name: _summary(norms) for name, norms in zip(groups, others)}
    _before["state"]["weights"] = _summary(of_weights)


@guarded
def _record_step(optimizer: Any) -> None:
    rates = [_rate(group) for group in optimizer.param_groups]
    weights, digest = _result(optimizer) or (None, None)
    record(
        "step",
        lr=rates,
        used=_used(optimizer),
        optimizer=_number(optimizer),
        kind=type(optimizer).__name__,
        scale=_scale,
        line=line(),
        weights=weights,
        digest=digest,
        **_before,
    )


def _rate(group: Mapping[str, Any]) -> float:
    """Return a parameter group's learning rate; 0 without a rate, because Adafactor may compute its own rate."""
    rate = group.get("lr")
    return 0.0 if rate is None else float(rate)


@guarded
def _result(optimizer: Any) -> tuple[float | None, int | None] | None:
    """Return the norm of the weights after a step, and a checksum of the norms of weights, state and buffers.

    Both are None if the weights are sharded, because shards depend on the world size.
    """
    weights = _parameters(optimizer)
    state = itertools.chain.from_iterable(_state(optimizer).values())
    of_weights, of_state, of_buffers = _norms(weights, [*state], _own_buffers())
    norm = _whole_norm(weights, of_weights)
    if norm is None:
        return None, None
    norms = [*of_weights, *of_state, *sorted(of_buffers)]  # sorted, because the order of _modules varies
    return norm, zlib.crc32(repr(norms).encode())


@guarded
def _used(optimizer: Any) -> list[int] | None:
    batches = sys.modules.get("samestep_record_batches")
    if batches is None:
        return None
    return list(batches.take(optimizer))


@guarded
def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return the numeric settings of each parameter group, such as momentum, without learning rates."""
    found = []
    for group in optimizer.param_groups:
        numbers = {}
        for name, value in group.items():
            is_number = isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
            if is_number and name not in ("lr", "initial_lr"):
                numbers[name] = value
        found.append(numbers)
    return found


def _state(optimizer: Any) -> dict[str, list[Any]]:
    """Return the tensors of an optimizer's state, by name, in the order of its parameters.

    After a resume, the order of the state itself may differ between ranks.
    """
    is_tensor = sys.modules["torch"].is_tensor
    found: dict[str, list[Any]] = {}
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    states = sorted(optimizer.state.items(), key=lambda item: places.get(id(item[0]), len(places)))
    for _, state in states:
        if not hasattr(state, "items"):  # an optimizer may also have other state than a dictionary for each parameter
            continue
        for name, value in state.items():
            if is_tensor(value):
                found.setdefault(str(name), []).append(value)
    return dict(sorted(found.items()))


def _buffers() -> dict[str, list[Any]]:
    """Return the buffers of all trained modules, by name."""
    found: dict[str, list[Any]] = {}
    for root in _modules():
        for part in root.modules():
            for name, value in persistent_buffers(part).items():
                found.setdefault(f"buffer {name}", []).append(value)
    return found


def persistent_buffers(part: Any) -> dict[str, Any]:
    """Return the persistent buffers of a module itself, not of its submodules, by name.

    No checkpoint contains a non-persistent buffer, which may cache a function of the inputs so far.
    """
    if not part._buffers:  # most modules, in each step
        return {}
    hidden = part._non_persistent_buffers_set
    return {name: each for name, each in part._buffers.items() if each is not None and name not in hidden}


def _modules() -> list[Any]:
    batches = sys.modules.get("samestep_record_batches")
    if batches is None:
        return []
    return list(batches.training_modules())


def _parameters(optimizer: Any) -> list[Any]:
    found = []
    for group in optimizer.param_groups:
        found += [each for each in group["params"] if each.requires_grad]
    return found


def joint_norm(values: Sequence[Any]) -> float:
    """Return the norm of all elements of the tensors, or of evenly spaced elements if the tensors are large."""
    return _summary(*_norms(values))[1]


def _summary(norms: list[float]) -> list[float]:
    """Return ``[number of tensors, their joint norm, number of tensors that are zero]``, from the tensors' norms."""
    total = sum(norm * norm for norm in norms) ** 0.5
    return [len(norms), total, norms.count(0.0)]


def _norms(*groups: Sequence[Any]) -> list[list[float]]:
    """Return the norms of each group's tensors, or of evenly spaced elements if a group is large."""
    try:
        return _norms_of_dense(groups)
    except RuntimeError:  # a tensor is sparse, as the buffer of a graph's edges may be
        return _norms_of_dense([[*map(_dense, values)] for values in groups])


def _dense(value: Any) -> Any:
    """Return the stored elements of a sparse tensor, or a dense tensor itself."""
    layout = value.layout
    torch = sys.modules["torch"]
    if layout is torch.strided:
        return value
    return value._values() if layout is torch.sparse_coo else value.values()


def _norms_of_dense(groups: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Return the norms of each group's tensors.

    One call of torch computes all norms, because each call takes microseconds in each step of the script.
    """
    torch = sys.modules["torch"]
    summable = torch.float16, torch.bfloat16, torch.float32, torch.float64
    parts = []
    with torch.no_grad():
        for values in groups:
            local = [each.to_local() if hasattr(each, "to_local") else each for each in values]
            stride = 1 + sum(each.numel() for each in local) // MOST_ELEMENTS
            for each in local:
                if stride > 1 or not each.is_contiguous():  # the order of a sum depends on the layout
                    each = each.reshape(-1)[::stride]
                parts.append(each if each.dtype in summable else each.double())
        norms = iter(map(float, torch._foreach_norm(parts, dtype=torch.float64) if parts else ()))
    return [[*itertools.islice(norms, len(values))] for values in groups]


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local") or type(value).__name__ == "FlatParameter"


def _whole_norm(weights: list[Any], norms: list[float]) -> float | None:
    """Return the joint norm of the weights; None if they are sharded, because shards depend on the world size."""
    if any(map(_is_sharded, weights)):
        return None
    return _summary(norms)[1]


def _own_buffers() -> list[Any]:
    """Return the persistent buffers, except the buffers that DistributedDataParallel broadcasts in each step."""
    found: list[Any] = []
    for root in _modules():
        if getattr(root, "broadcast_buffers", False):
            continue
        for part in root.modules():
            buffers = persistent_buffers(part)
            if buffers and part not in _broadcast:
                found += buffers.values()
    return found


def _watch_replicas(module: ModuleType) -> None:
    watch(module.DistributedDataParallel, "__init__", after=_note_replica)


def _note_replica(_: None, replica: Any, *__: Any, **___: Any) -> None:
    """Note the modules whose buffers DistributedDataParallel broadcasts."""
    if replica.broadcast_buffers:
        _broadcast.update(replica.modules())


def _watch_scaler(module: ModuleType) -> None:
    watch(module.GradScaler, "step", before=_scaled)


def _scaled(scaler: Any, *_: Any, **__: Any) -> None:
    global _scale
    if scaler.is_enabled():
        _scale = float(scaler.get_scale())


# --- precision -------------------------------------------------------------------------------------------------------


def _watch_autocast(module: ModuleType) -> None:
    watch(module.autocast, "__enter__", after=_autocasts)


def _autocasts(_: Any, context: Any) -> None:
    if context._enabled:
        note_precision(context.fast_dtype)


def note_precision(dtype: Any) -> None:
    """Record a floating-point type that the training uses, once."""
    if dtype in _dtypes:
        return
    _dtypes.add(dtype)
    if dtype.is_floating_point:
        record("precision", eps=sys.modules["torch"].finfo(dtype).eps)


# --- other libraries -------------------------------------------------------------------------------------------------


def _watch_accelerator(module: ModuleType) -> None:
    """Record how many examples of this rank's last batch are padding, which gather_for_metrics drops."""
    size = sys.modules["accelerate.utils.operations"].find_batch_size

    def gathered(found: Any, accelerator: Any, data: Any, *_: Any, **__: Any) -> None:
        global _dropped_in
        local = size(data) or 0
        total = size(found) or 0
        dropped = local - min(local, max(0, total - accelerator.process_index * local))
        if dropped and _dropped_in != _newest_loader:  # a script may gather several tensors per loader
            _dropped_in = _newest_loader
            record("dropped", count=dropped)

    watch(module.Accelerator, "gather_for_metrics", after=gathered)


def _watch_parts(module: ModuleType) -> None:
    """Record which parts of samestep.torch the script uses."""
    own = module.__getattr__

    def used(name: str) -> Any:
        value = own(name)
        if name in module.__all__:
            record("part", name=name)
        return value

    module.__getattr__ = used  # type: ignore[method-assign]


def _watch_groups(module: ModuleType) -> None:
    watch(module, "init_process_group", after=lambda *_, **__: _record_timeout(module))


def _record_timeout(module: ModuleType) -> None:
    """Record the timeout of the default group's collectives, in seconds."""
    group = module._get_default_group()
    backend = group._get_backend(group._device_types[0])
    record("timeout", seconds=backend.options._timeout.total_seconds())
