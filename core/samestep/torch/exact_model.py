"""Make batch norms and dropouts independent of the world size, and the order of DDP's sums independent of restarts."""

from __future__ import annotations

import random
import time
import warnings
import weakref
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.parallel import DistributedDataParallel

from samestep.step_timer import StepTimer
from samestep.torch import batch_norm
from samestep.torch import dropout as row_dropout
from samestep.torch.buffer_watch import BufferWatch
from samestep.torch.dropout import ModelRows, generator_states
from samestep.torch.ranks import Group, place
from samestep.torch.reduction import register_ordered_hook
from samestep.torch.samplers import GlobalBatchSampler, HasRows

Model = TypeVar("Model", bound=nn.Module)

_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: batch_norm.GlobalBatchNorm1d,
    nn.BatchNorm2d: batch_norm.GlobalBatchNorm2d,
    nn.BatchNorm3d: batch_norm.GlobalBatchNorm3d,
    nn.SyncBatchNorm: batch_norm.GlobalSyncBatchNorm,
}
_DROPOUTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: row_dropout.RowDropoutElements,
    nn.Dropout1d: row_dropout.RowDropout1d,
    nn.Dropout2d: row_dropout.RowDropout2d,
    nn.Dropout3d: row_dropout.RowDropout3d,
    nn.AlphaDropout: row_dropout.RowAlphaDropoutElements,
    nn.FeatureAlphaDropout: row_dropout.RowFeatureAlphaDropout,
}
_REPLACED = {**_NORMS, **_DROPOUTS}
_GLOO_SECONDS = 0.01  # time in which gloo's thread frees the tensors of a collective
_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def exact(model: Model, rows: HasRows | None = None, timer: StepTimer | None = None, padded: bool = False) -> Model:
    """Make a model's batch norms and dropouts independent of the world size, and return the model.

    This function changes the model in place. Batch norms compute statistics over all ranks' rows, or over each
    sub-shard with virtual ranks. A dropout's mask depends on a row's position in the global batch. Parameters, buffers
    and the names in a state_dict stay the same. For a DDP model, gradients are summed in an order that a restart does
    not change. DDP stops broadcasting buffers, because the buffers are equal on all ranks. Call this function after
    wrapping the model in DDP, and before torch.compile.

    The first forward pass in training checks that no other module draws random numbers, and that it leaves the buffers
    of a DDP model equal on all ranks. A compiled model skips these checks.

    Args:
        model: a module, or a DDP model. The first dimension of a dropout's input must be the batch.
        rows: the sampler, or a `FixedRows`. Pass None only for a model without dropouts.
        timer: timer that counts waits for other ranks as communication, or None.
        padded: whether each rank pads its rows at their end, to its own longest row. The masks of dropouts then depend
            on the indices of a value, and not on the padding. Pass the same value on all ranks and at each resume.

    Raises:
        ValueError: a module cannot be made exact (the message has its name), or a sub-shard is too small for a batch
            norm; see `separate`. The first forward pass raises ValueError if one of its checks fails.
    """
    root = model.module if isinstance(model, DistributedDataParallel) else model
    for name, module in root.named_modules():
        check_module(name or "the model", module, rows)
    model_rows = ModelRows(rows, padded)
    group = group_of(model, rows)
    norms = []
    for module in root.modules():
        if type(module) in _NORMS:
            norms.append(module)
            module.rows = rows
            module.timer = timer
            module.group = group
        elif type(module) in _DROPOUTS:
            module.rows = model_rows
        module.__class__ = _REPLACED.get(type(module), type(module))
    trained = [norm for norm in norms if norm.training or not root.training]  # without frozen norms
    if trained and getattr(rows, "virtual_ranks", None):
        separate(trained, rows)
    DrawWatch(root, model_rows)
    if isinstance(model, DistributedDataParallel):
        # The attribute has this name in all versions of torch. DDP's argument was renamed after torch 2.11.
        model.broadcast_buffers = False
        if place().world_size > 1:
            register_ordered_hook(model, timer)
            BufferWatch(model, _NORMS.values(), getattr(rows, "virtual_ranks", None) is not None)
            # Freeing a DDP model waits for gloo's thread, and holds the GIL. If this thread has not yet freed the
            # tensors of its last collective, it waits for the GIL: a deadlock. The sleep releases the GIL before.
            weakref.finalize(model, time.sleep, _GLOO_SECONDS)
    return model


def group_of(model: nn.Module, rows: HasRows | None) -> Group:
    """Return the ranks over which batch norms compute statistics; None means all ranks.

    Without ``rows``, these are the ranks over which a DDP model reduces its gradients.
    """
    if rows is not None:
        return getattr(rows, "group", None)
    if isinstance(model, DistributedDataParallel) and model.process_group is not dist.group.WORLD:
        group: Group = model.process_group
        return group
    return None


def check_module(name: str, module: nn.Module, rows: HasRows | None) -> None:
    """Raise ValueError, with the module's name, if a module cannot be made exact.

    Args:
        name: name of the module in its model, for the error.
        module: the module to check.
        rows: the sampler or the `FixedRows`, or None.
    """
    kind = type(module)
    if kind in _REPLACED.values():
        raise ValueError(f"{name} is exact already: call exact() once, and use one ExactTrainer per model")
    if isinstance(module, batchnorm._BatchNorm) and kind in _NORMS and not module.track_running_stats:
        raise ValueError(
            f"{name} keeps no running statistics, so an evaluation depends on the number of ranks: use "
            "track_running_stats=True"
        )
    if isinstance(module, instancenorm._InstanceNorm) and module.track_running_stats and module.training:
        raise ValueError(f"{name} keeps running statistics of one rank's rows: use track_running_stats=False")
    if isinstance(module, dropout._DropoutNd) and kind in _DROPOUTS and module.p > 0 and rows is None:
        raise ValueError(f"{name} is a dropout, which needs the rows of the batch: pass the sampler, or FixedRows")
    if is_sharded_itself(module):
        raise ValueError(
            f"fully_shard has replaced the class of {name}: call exact() before, or shard its parent instead"
        )
    if isinstance(module, (batchnorm._BatchNorm, dropout._DropoutNd)) and kind not in _REPLACED:
        raise ValueError(f"{name} is a {kind.__module__}.{kind.__qualname__}, which exact() does not know")
    check_draws(name, module)


def is_sharded_itself(module: nn.Module) -> bool:
    """Return whether FSDP2's fully_shard was called on a norm or a dropout itself, which changes its class."""
    is_known = isinstance(module, (batchnorm._BatchNorm, dropout._DropoutNd))
    bases = [base.__name__ for base in type(module).__mro__]
    return is_known and "FSDPModule" in bases  # compared by name, because an import of the class is slow


def check_draws(name: str, module: nn.Module) -> None:
    """Raise ValueError if a module draws random numbers that `exact` cannot replace."""
    kind = type(module).__name__
    if isinstance(module, _DRAWING):
        raise ValueError(f"{name} ({kind}) draws random numbers, which exact() cannot replace: use another module")
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout:
        raise ValueError(
            f"{name} ({kind}) has a dropout of {module.dropout}, which exact() cannot replace: set it to 0"
        )


def separate(norms: list[Any], rows: Any) -> None:
    """Create each norm's buffer ``sums`` for the statistics of a sub-shard, which `GradientTree` sums.

    Args:
        norms: the model's `GlobalBatchNorm` modules.
        rows: the sampler, or a `FixedRows`.

    Raises:
        ValueError: a sub-shard of an epoch's last batch has fewer than 2 samples.
    """
    if isinstance(rows, GlobalBatchSampler):
        last = len(rows) - 1
        size = rows.batches.size(last)
        parts = rows.batches.num_micro_batches(last)
        if size < 2 * parts:
            raise ValueError(
                f"{size} examples of an epoch's last batch make {parts} sub-shards, and batch norm needs 2 in each: "
                "lower virtual_ranks or accumulate, or use drop_last=True"
            )
    for norm in norms:
        norm.sums = norm.running_mean.new_zeros(2 * norm.num_features + 1)


class DrawWatch:
    """Check in the first training forward pass that `exact` has replaced all modules that draw random numbers.

    A module that draws from ``random`` or ``numpy.random`` causes only a warning. Its numbers are correct if all ranks
    draw the same number of values, as in stochastic depth by batch.
    """

    def __init__(self, model: nn.Module, model_rows: ModelRows) -> None:
        self._model = model
        self._model_rows = model_rows
        self._hooks: list[Any] = []
        self._is_done = False
        self._python_state: Any = None
        model.register_forward_pre_hook(self.begin)  # never removed, because torch.compile would then compile again

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Store the states of the generators before the model's forward pass, and register hooks on its modules."""
        if torch.compiler.is_compiling() or self._is_done or not module.training or module is not self._model:
            return
        if not self._hooks:
            self._hooks = [each.register_forward_hook(self.end) for each in self._model.modules()]
        self._model_rows.state = generator_states()
        self._python_state = python_state()

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Compare the states of the generators after a module's forward pass.

        torch calls this hook for inner modules first.

        Args:
            module: the module whose forward pass has ended.
            inputs: ignored.
            output: ignored.

        Raises:
            ValueError: the module has drawn random numbers from torch, or `exact` has not seen the module.
        """
        if torch.compiler.is_compiling() or self._model_rows.state is None:
            return
        if is_late(module):
            raise ValueError(f"{self._name(module)} was added to the model after exact(): call exact() later")
        if not all(map(torch.equal, self._model_rows.state, generator_states())):
            raise ValueError(
                f"{self._name(module)} draws random numbers in its forward pass, which differ with the number of "
                "ranks: use nn.Dropout modules instead of F.dropout, or set its dropout to 0"
            )
        if python_state() != self._python_state:
            self._python_state = python_state()
            warnings.warn(
                f"{self._name(module)} draws from random or numpy.random in its forward pass: if it draws a value for "
                "each row, the values differ with the number of ranks",
                stacklevel=2,
            )
        if module is self._model:
            self._is_done = True
            self._model_rows.state = None
            for hook in self._hooks:
                hook.remove()

    def _name(self, module: nn.Module) -> str:
        """Return the name and the class of a module of the model."""
        names = {each: name for name, each in self._model.named_modules()}
        return f"{names.get(module) or 'the model itself'} ({type(module).__name__})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DrawWatch:
        return self


def is_late(module: nn.Module) -> bool:
    """Return whether `exact` would replace a module, because the module is in training and not a dropout with p=0."""
    return type(module) in _REPLACED and module.training and getattr(module, "p", 1.0) != 0


def python_state() -> tuple[Any, ...]:
    """Return the states of ``random`` and ``numpy.random``."""
    _, keys, *others = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), others
