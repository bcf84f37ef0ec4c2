"""Record what a process of a checked script does, as lines of JSON in a file for each process.

``samestep check`` puts this folder first on PYTHONPATH. A script that has no torch DataLoader needs an adapter, a file
that ``samestep check --adapter FILE`` runs at the start of each process. The adapter calls these functions:

* ``after_import(module, function)`` calls ``function(module)`` once the script has imported a module.
* ``record_batch(indices)`` records the examples of the next step, if the script has an optimizer of torch.
* ``record_step(indices, lr, loss)`` records a step of this rank, if it has another optimizer.
* ``record_evaluation(indices, size)`` records a whole evaluation of this rank.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any

_config: dict[str, Any] = json.loads(os.environ.get("SAMESTEP_CHECK") or "{}")
_RANKS = (
    "REPLICA_GROUP_ID",  # torchft's, which has a rank 0 in each group
    *("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PADDLE_TRAINER_ID", "RANK_ID", "SLURM_PROCID"),
    "SAMESTEP_RANK",  # mnist_elastic's
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MOST_TENSORS = 16  # whose norms are recorded
_lock = threading.RLock()
_hooks: dict[str, list[Callable[[ModuleType], None]]] = {}
_state: dict[str, Any] = {"saves": 0, "loaders": 0, "step": None, "before": None, "folders": set(), "dropped": 0}


def after_import(module: str, function: Callable[[ModuleType], None]) -> None:
    """Call ``function(module)`` once a module of this name has been imported."""
    _hooks.setdefault(module, []).append(function)


def record_batch(indices: Iterable[int]) -> None:
    """Record the examples of this rank's next step, as numbers from 0."""
    _record("batch", loader=0, size=None, indices=[int(index) for index in indices], trains=True)


def record_step(indices: Iterable[int] | None = None, lr: float | None = None, loss: float | None = None) -> None:
    """Record an optimizer step of this rank.

    Args:
        indices: the examples of this rank's shard, as numbers from 0.
        lr: the learning rate of the step.
        loss: the mean loss over the global batch.
    """
    if indices is not None:
        record_batch(indices)
    _record("step", lr=[] if lr is None else [float(lr)], loss=None if loss is None else float(loss))
    time.sleep(_config.get("pause", 0))


def record_evaluation(indices: Iterable[int], size: int) -> None:
    """Record the examples that this rank has evaluated and counted, of a dataset of ``size`` examples."""
    _record("evaluated", indices=[int(index) for index in indices], size=size)


def start() -> None:
    """Install the hooks, and run the adapter."""
    if not _config:
        return
    _record("start")
    sys.addaudithook(_audit)
    after_import("torch.utils.data.dataloader", _watch_loaders)
    after_import("torch.optim.optimizer", _watch_optimizers)
    after_import("torch.serialization", _watch_saves)
    after_import("accelerate.accelerator", _watch_accelerator)
    sys.meta_path.insert(0, _Finder())
    if adapter := _config.get("adapter"):
        with open(adapter) as file:
            names = {"__name__": "samestep_adapter", "__file__": adapter}
            exec(compile(file.read(), adapter, "exec"), names)  # noqa: S102  # the user's file


def _rank() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if getattr(distributed, "is_initialized", bool)():
        return int(distributed.get_rank())  # type: ignore[union-attr]
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdigit()), None)


def _record(event: str, **values: Any) -> None:
    if not _config:
        return
    line = json.dumps({"event": event, "time": time.time(), "rank": _rank(), **values}) + "\n"
    with _lock, open(os.path.join(_config["records"], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(line)


class _Finder(importlib.abc.MetaPathFinder):
    """Call the hooks of a module after its import."""

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


# --- files -----------------------------------------------------------------------------------------------------------


def _audit(event: str, values: Any) -> None:
    if event == "open":
        path, _, flags = values
        if not isinstance(path, int) and path is not None and flags & _WRITES:
            _written(path, "open", flags)
    elif event == "os.rename":
        source = _inside(values[0], follow=False)
        _written(values[1], "rename", 0, of_checkpoint=source in _state["folders"])
    elif event in ("os.link", "os.symlink"):
        _inside(values[1], follow=False)
    elif event in ("os.remove", "os.rmdir", "shutil.rmtree"):
        if (*values, None)[1] in (-1, None):  # else shutil.rmtree was checked
            _inside(values[0], follow=False)
    elif event in ("os.mkdir", "os.truncate") and not isinstance(values[0], int):
        _inside(values[0])


def _inside(path: Any, follow: bool = True) -> str | None:
    """Return the real path to write, None for a record; refuse one outside of the copied folder."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    full = os.path.realpath(os.path.join(folder, name) if follow else folder)
    full = full if follow else os.path.join(full, name)
    below = [each for each in (*_config["allowed"], _config["work"]) if (full + os.sep).startswith(each + os.sep)]
    if full.startswith(_config["records"] + os.sep):
        return None
    source = (full + os.sep).startswith(_config["source"] + os.sep)
    if (source and max(map(len, below), default=0) < len(_config["source"])) or not (below or "__pycache__" in full):
        _record("outside", path=full)
        raise PermissionError(f"samestep check: a write outside of the copied folder: {full}: --allow-write allows it")
    return full


def _written(path: Any, kind: str, flags: int, of_checkpoint: bool = False) -> None:
    full = _inside(path)
    if full is None or "__pycache__" in full:
        return
    if not of_checkpoint and not re.search(_config["checkpoint"], os.path.basename(full)):
        return
    _state["folders"].add(os.path.dirname(full))
    _record("save", kind=kind, path=full)
    _state["saves"] += kind == _config.get("kill_at")
    marker = os.path.join(_config["records"], "killed")
    if _state["saves"] != _config.get("kill_save") or kind != _config.get("kill_at") or os.path.exists(marker):
        return
    os.close(os.open(marker, os.O_CREAT))
    if kind == "open":  # what the open was about to do: the file is empty
        os.close(os.open(full, os.O_CREAT | os.O_WRONLY | (flags & os.O_TRUNC)))
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_saves(module: ModuleType) -> None:
    """Make torch.save announce the file that its C++ writes."""
    save = module.save

    def announced(obj: Any, f: Any, *args: Any, **named: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            sys.audit("open", os.fspath(f), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return save(obj, f, *args, **named)

    module.save = announced  # type: ignore[attr-defined]


# --- torch -----------------------------------------------------------------------------------------------------------


def _watch_loaders(module: ModuleType) -> None:
    """Record the indices of each batch that a DataLoader has returned."""
    base = module._BaseDataLoaderIter
    begin, reset, next_index, next_batch = base.__init__, base._reset, base._next_index, base.__next__

    def renew(iterator: Any, loader: Any) -> None:
        _state["loaders"] += 1
        iterator._samestep = _state["loaders"], deque()
        sizes = {"size": _size(loader.dataset), "batches": _size(loader), "subset": _subset(loader.dataset)}
        _record("iterate", loader=_state["loaders"], **sizes)
        weakref.finalize(iterator, _record, "gone", loader=_state["loaders"]).atexit = False

    def init(self: Any, loader: Any, *args: Any, **named: Any) -> None:
        renew(self, loader)
        begin(self, loader, *args, **named)

    def restart(self: Any, loader: Any, *args: Any, **named: Any) -> None:
        renew(self, loader)
        reset(self, loader, *args, **named)

    def index(self: Any) -> Any:
        found = next_index(self)
        self._samestep[1].append(found)
        return found

    def following(self: Any) -> Any:
        number, queue = self._samestep
        try:
            batch = next_batch(self)
        except StopIteration:
            _record("end", loader=number)
            raise
        trains = sys.modules["torch"].is_grad_enabled()
        indices = _examples(self._dataset, queue.popleft() if queue else None)
        _record("batch", loader=number, indices=indices, trains=trains)
        return batch

    base.__init__, base._reset, base._next_index, base.__next__ = init, restart, index, following


def _size(values: Any) -> int | None:
    while hasattr(values, "indices") and hasattr(values, "dataset"):  # torch's Subset
        values = values.dataset
    try:
        return len(values)
    except TypeError:  # of an IterableDataset
        return None


def _subset(dataset: Any) -> list[int] | None:
    """Return the length of a Subset and a checksum of its indices, None for another dataset."""
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        return [len(dataset.indices), zlib.crc32(repr([int(i) for i in dataset.indices]).encode())]
    return None


def _watch_accelerator(module: ModuleType) -> None:
    """Record how many examples gather_for_metrics drops of this rank's last batch, as they only fill it."""
    gather, size = module.Accelerator.gather_for_metrics, sys.modules["accelerate.utils.operations"].find_batch_size

    def gathered(self: Any, data: Any, *args: Any, **named: Any) -> Any:
        found = gather(self, data, *args, **named)
        local, total = size(data) or 0, size(found) or 0
        dropped = local - min(local, max(0, total - self.process_index * local))
        if dropped and _state["dropped"] != _state["loaders"]:  # once for all tensors of a batch
            _state["dropped"] = _state["loaders"]
            _record("dropped", count=dropped)
        return found

    module.Accelerator.gather_for_metrics = gathered


def _examples(dataset: Any, batch: Any) -> list[int] | None:
    """Return the numbers of a batch's examples in the whole dataset; None if they have no numbers."""
    if hasattr(batch, "tolist"):  # an array or a tensor, by which some datasets read whole batches
        batch = batch.tolist()
    indices = batch if isinstance(batch, (list, tuple)) else [batch]
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    try:
        return [int(index) for index in indices]
    except (TypeError, ValueError):
        return None


def _norm(tensors: Iterable[Any]) -> float:
    local = [each.to_local() if hasattr(each, "to_local") else each for each in list(tensors)[:_MOST_TENSORS]]
    return float(sum(float(each.detach().double().norm()) for each in local))


def _watch_optimizers(module: ModuleType) -> None:
    """Record each step, with the optimizer's state before it and the weights after it."""

    def before(optimizer: Any, *_: Any) -> None:
        caller = sys._getframe(1)  # the call of step(), which is also the caller of ``after``
        frame: FrameType | None = caller
        while frame is not None and frame is not _state["step"]:
            frame = frame.f_back
        # Horovod's optimizer steps inside a step. An exception may have ended the step before, without ``after``.
        if frame is None:
            _state["step"] = caller
            is_tensor = sys.modules["torch"].is_tensor
            found = [value for state in optimizer.state.values() for value in state.values() if is_tensor(value)]
            random = zlib.crc32(sys.modules["torch"].get_rng_state().numpy().tobytes())
            _state["before"] = {"state": [len(found), _norm(found)], "weights_before": _weights(optimizer)}
            _state["before"]["random"] = random

    def after(optimizer: Any, *_: Any) -> None:
        if sys._getframe(1) is _state["step"]:
            _state["step"] = None
            lr = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            _record("step", lr=lr, weights=_weights(optimizer), **_state["before"])
            time.sleep(_config.get("pause", 0))

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


def _weights(optimizer: Any) -> float | None:
    """Return a norm of the weights; None if this rank holds shards of them, which depend on the number of ranks."""
    weights = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if any(hasattr(each, "to_local") or type(each).__name__ == "FlatParameter" for each in weights[:_MOST_TENSORS]):
        return None
    return _norm(weights)
