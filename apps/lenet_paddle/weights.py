"""Weights and optimizer state as arrays, under the names and in the layouts that all apps share, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor, nn
from paddle.optimizer import Optimizer
from samestep import FatalError
from samestep.checkpoint import Arrays, mismatch
from samestep.run import Groups

# What the optimizers keep of each parameter, as Paddle calls it: Momentum, then Adam.
ACCUMULATORS = ("velocity_0", "moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


def groups(model: nn.Layer, optimizer: Optimizer) -> Groups:
    """What a checkpoint holds. Raises FatalError for what `load` could not put back."""
    return {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}


def load(model: nn.Layer, optimizer: Optimizer, groups: Groups) -> None:
    """The reverse of `groups`; also of weights alone. Raises ValueError for what does not fit."""
    load_model(model, groups["model"])
    load_optimizer(model, optimizer, groups.get("optimizer", {}))


def model_arrays(model: nn.Layer) -> Arrays:
    """The weights under their canonical names, as arrays on the CPU: what checkpoints and model.safetensors hold."""
    swapped = transposed(model)
    return {name: canonical(value.numpy(), name in swapped) for name, value in model.state_dict().items()}


def optimizer_arrays(model: nn.Layer, optimizer: Optimizer) -> Arrays:
    """The optimizer's state as ``<parameter>.<key>``, such as ``fc.0.weight.moment1_0``, laid out as the weights.

    Raises FatalError for an optimizer that keeps anything else than ACCUMULATORS, be it the state of a schedule.
    """
    arrays, swapped = {}, transposed(model)
    # Paddle joins its own name of a parameter, such as linear_0.w_0, and the accumulator's.
    known = {f"{p.name}_{key}": (name, key, p) for name, p in model.named_parameters() for key in ACCUMULATORS}
    for paddles_name, value in optimizer.state_dict().items():
        name, key, parameter = known.get(paddles_name, ("", "", None))
        if parameter is None or misfit(value, key, parameter):
            kind = type(optimizer).__name__
            raise FatalError(f"{kind}'s {paddles_name} cannot be kept in a checkpoint: use another optimizer")
        arrays[f"{name}.{key}"] = canonical(value.numpy(), name in swapped and value.ndim == 2)
    return arrays


def load_model(model: nn.Layer, arrays: Arrays) -> None:
    """The reverse of `model_arrays`. Raises ValueError unless names, shapes and dtypes are the model's."""
    difference = mismatch(arrays, model_arrays(model))
    if difference:
        raise ValueError(difference)
    swapped = transposed(model)
    model.set_state_dict({name: canonical(array, name in swapped) for name, array in arrays.items()})


def load_optimizer(model: nn.Layer, optimizer: Optimizer, arrays: Arrays) -> None:
    """The reverse of `optimizer_arrays`. Raises ValueError unless each array fits its parameter."""
    parameters, swapped, state = dict(model.named_parameters()), transposed(model), {}
    for full_name, array in arrays.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters.get(name)
        if parameter is None or key not in ACCUMULATORS:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        place = paddle.CPUPlace() if "_pow_" in key else None  # where Adam keeps them, whatever the device
        value = paddle.to_tensor(canonical(array, name in swapped and array.ndim == 2), place=place)
        difference = misfit(value, key, parameter)
        if difference:
            raise ValueError(f"{full_name} is {difference}")
        state[f"{parameter.name}_{key}"] = value
    if state:
        optimizer.set_state_dict(state)


def misfit(value: Tensor, key: str, parameter: Tensor) -> str | None:
    """Why ``value`` cannot be the accumulator ``key`` of ``parameter``, in words; None where it can."""
    wanted = [1] if "_pow_" in key else list(parameter.shape)  # Adam's powers of beta are scalars
    if list(value.shape) == wanted and value.dtype == parameter.dtype:
        return None
    return f"{value.dtype} {list(value.shape)}, not {parameter.dtype} {wanted}".replace("paddle.", "")


def transposed(model: nn.Layer) -> set[str]:
    """The parameters that Paddle keeps as [in, out] and all other apps as [out, in]: a linear layer's weight."""
    return {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}


def canonical(array: NDArray[Any], swap: bool) -> NDArray[Any]:
    """A copy of ``array``, with its two axes swapped where the layouts differ; its own reverse."""
    return np.ascontiguousarray(array.T if swap else array)
