"""Connect a `samestep.trace.Trace` to an optimizer's updates, without changes to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.torch.sharded_state import is_sharded, part_of, to_array
from samestep.trace import Trace, digest


def watch(parameters: Mapping[str, Tensor], trace: Trace) -> None:
    """Let ``trace`` digest weights and gradients when any optimizer of this process updates ``parameters``.

    Hooks call `Trace.begin_update` before the update, and `Trace.end_update` after it.

    Args:
        parameters: the weights by name, in the same order on all ranks. A rank digests only its own shard of a DTensor.
        trace: the trace. This function sets its attributes.
    """
    own = {id(parameter) for parameter in parameters.values()}

    def update_of_own(call: Callable[[], None]) -> Callable[..., None]:
        def hook(optimizer: Optimizer, arguments: Any, named: Any) -> None:
            if any(id(group["params"][0]) in own for group in optimizer.param_groups):
                call()

        return hook

    trace.weights = lambda: {name: _digest(parameter) for name, parameter in parameters.items()}
    trace.gradients = lambda: {name: _digest(parameter.grad) for name, parameter in parameters.items()}
    trace.copies = frozenset(name for name, parameter in parameters.items() if _is_copy(parameter))
    # The hooks apply to all optimizers, because a framework may wrap or replace the app's optimizer.
    register_optimizer_step_pre_hook(update_of_own(trace.begin_update))
    register_optimizer_step_post_hook(update_of_own(trace.end_update))


def _digest(value: Tensor | None) -> int:
    """Return the digest of a tensor, or of this rank's shard of it; 0 for None."""
    if value is None:
        return 0
    if not is_sharded(value):
        return digest(to_array(value))
    part = part_of(value)
    local: Any = value
    return digest(to_array(local.to_local()).reshape(part.shape), part.offset, tuple(value.shape))


def _is_copy(parameter: Tensor) -> bool:
    return is_sharded(parameter) and part_of(parameter).is_copy
