"""The model, LeNet as Paddle ships it: 61,610 parameters; and its weights in the layout that all apps share."""

from __future__ import annotations

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn
from paddle.optimizer import Optimizer
from paddle.vision.models import LeNet
from samestep.checkpoint import Arrays, mismatch

# What the optimizers keep of each parameter, as Paddle calls it: Momentum, then Adam.
ACCUMULATORS = ("velocity_0", "moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


def build_model(dtype: str, seed: int) -> nn.Layer:
    """Images [m, 1, 28, 28] to scores [m, 10], with the initial weights that ``seed`` decides.

    They are drawn in float32 whatever ``dtype`` is, so that a float64 run starts from the same weights. From here on
    ``dtype`` is Paddle's default: it is also that of an optimizer's learning rate.
    """
    paddle.seed(seed)
    model = LeNet().to(dtype=dtype)
    paddle.set_default_dtype(dtype)
    return model


def transposed(model: nn.Layer) -> set[str]:
    """The parameters that Paddle keeps as [in, out] and all other apps as [out, in]: a linear layer's weight."""
    return {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}


def canonical(array: NDArray[np.generic], swap: bool) -> NDArray[np.generic]:
    """A copy of ``array``, with its two axes swapped where the layouts differ; its own reverse."""
    return np.ascontiguousarray(array.T if swap else array)


def model_arrays(model: nn.Layer) -> Arrays:
    """The weights under their canonical names, as arrays on the CPU: what checkpoints and model.safetensors hold."""
    swapped = transposed(model)
    return {name: canonical(value.numpy(), name in swapped) for name, value in model.state_dict().items()}


def optimizer_arrays(model: nn.Layer, optimizer: Optimizer) -> Arrays:
    """The optimizer's state as ``<parameter>.<key>``, such as ``fc.0.weight.moment1_0``, laid out as the weights."""
    state, swapped = optimizer.state_dict(), transposed(model)
    return {
        f"{name}.{key}": canonical(value.numpy(), name in swapped and value.ndim == 2)
        for name, parameter in model.named_parameters()
        for key in ACCUMULATORS
        if (value := state.get(f"{parameter.name}_{key}")) is not None
    }


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
        value = canonical(array, name in swapped and array.ndim == 2)
        wanted = [1] if "_pow_" in key else list(parameter.shape)  # Adam's powers of beta are scalars
        dtype = str(parameter.dtype).removeprefix("paddle.")
        if list(value.shape) != wanted or value.dtype != dtype:
            raise ValueError(f"{full_name} is {value.dtype} {list(value.shape)}, not {dtype} {wanted}")
        state[f"{parameter.name}_{key}"] = paddle.to_tensor(value)
    if state:
        optimizer.set_state_dict(state)
