"""Convert weights and optimizer state to arrays and back. Arrays of weights have PyTorch's names and layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor, nn
from paddle.optimizer import Optimizer
from samestep import NonRetryableError
from samestep.checkpoint import Arrays, state_dict_diff
from samestep.run import Groups

# Suffixes in the names of Paddle's optimizer state: velocity_0 for Momentum, the other suffixes for Adam.
ACCUMULATORS = ("velocity_0", "moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


def groups(model: nn.Layer, optimizer: Optimizer) -> Groups:
    """Return the arrays of a checkpoint: ``{"model": {name: array}, "optimizer": {name: array}}``.

    Raises:
        NonRetryableError: as in `optimizer_arrays`.
    """
    return {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}


def load(model: nn.Layer, optimizer: Optimizer, groups: Groups) -> None:
    """Load the arrays of `groups`, or only the group "model".

    Raises:
        ValueError: an array does not fit the model or the optimizer.
    """
    load_model(model, groups["model"])
    load_optimizer(model, optimizer, groups.get("optimizer", {}))


def model_arrays(model: nn.Layer) -> Arrays:
    """Return the weights as arrays on the CPU, with the names and layouts of checkpoints and model.safetensors."""
    swapped = transposed(model)
    return {name: canonical(value.numpy(), name in swapped) for name, value in model.state_dict().items()}


def optimizer_arrays(model: nn.Layer, optimizer: Optimizer) -> Arrays:
    """Return the optimizer's state by ``<parameter>.<key>``, such as fc.0.weight.moment1_0, in the weight's layout.

    Raises:
        NonRetryableError: ACCUMULATORS does not list a value of the optimizer's state, such as a schedule's state, or
            the value has an unexpected shape or dtype.
    """
    swapped = transposed(model)
    # A key joins Paddle's name of the parameter, such as linear_0.w_0, and the name of the accumulator.
    known = {}
    for name, parameter in model.named_parameters():
        for key in ACCUMULATORS:
            known[f"{parameter.name}_{key}"] = (name, key, parameter)
    arrays = {}
    for paddle_name, value in optimizer.state_dict().items():
        name, key, parameter = known.get(paddle_name, ("", "", None))
        if parameter is None or shape_mismatch_error(value, key, parameter):
            raise NonRetryableError(
                f"{type(optimizer).__name__}'s {paddle_name} cannot be kept in a checkpoint: use another optimizer"
            )
        is_swapped = name in swapped and value.ndim == 2
        arrays[f"{name}.{key}"] = canonical(value.numpy(), is_swapped)
    return arrays


def load_model(model: nn.Layer, arrays: Arrays) -> None:
    """Load arrays that `model_arrays` returned.

    Raises:
        ValueError: names, shapes or dtypes differ from the model's.
    """
    difference = state_dict_diff(arrays, model_arrays(model))
    if difference:
        raise ValueError(difference)
    swapped = transposed(model)
    model.set_state_dict({name: canonical(array, name in swapped) for name, array in arrays.items()})


def load_optimizer(model: nn.Layer, optimizer: Optimizer, arrays: Arrays) -> None:
    """Load arrays that `optimizer_arrays` returned.

    Raises:
        ValueError: an array does not fit its parameter.
    """
    parameters = dict(model.named_parameters())
    swapped = transposed(model)
    state = {}
    for full_name, array in arrays.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters.get(name)
        if parameter is None or key not in ACCUMULATORS:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        place = paddle.CPUPlace() if "_pow_" in key else None  # Adam keeps powers of beta on the CPU
        is_swapped = name in swapped and array.ndim == 2
        value = paddle.to_tensor(canonical(array, is_swapped), place=place)
        difference = shape_mismatch_error(value, key, parameter)
        if difference:
            raise ValueError(f"{full_name} is {difference}")
        state[f"{parameter.name}_{key}"] = value
    if state:
        optimizer.set_state_dict(state)


def shape_mismatch_error(value: Tensor, key: str, parameter: Tensor) -> str | None:
    """Compare the shape and dtype of a value with a parameter's accumulator.

    Args:
        value: value to restore.
        key: name of the accumulator.
        parameter: parameter that the accumulator belongs to.

    Returns:
        A text with the difference; None if shape and dtype are equal.
    """
    expected = list(parameter.shape)
    if "_pow_" in key:  # Adam's powers of beta are scalars
        expected = [1]
    if list(value.shape) == expected and value.dtype == parameter.dtype:
        return None
    return f"{value.dtype} {list(value.shape)}, not {parameter.dtype} {expected}".replace("paddle.", "")


def transposed(model: nn.Layer) -> set[str]:
    """Return the names of linear layers' weights, which Paddle stores as [in, out], and checkpoints as [out, in]."""
    return {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}


def canonical(array: NDArray[Any], swap: bool) -> NDArray[Any]:
    """Return ``array`` in C order, transposed if ``swap`` is true. The function is its own inverse."""
    if swap:
        array = array.T
    return np.ascontiguousarray(array)
