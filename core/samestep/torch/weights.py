"""Convert weights and optimizer state to arrays and back, with the names that all PyTorch apps share."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import NonRetryableError
from samestep.checkpoint import Arrays, state_dict_diff
from samestep.run import Groups


def groups(model: nn.Module, optimizer: Optimizer) -> Groups:
    """Return a checkpoint's arrays by group and name.

    Raises:
        NonRetryableError: `load` could not restore an array.
    """
    return {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}


def load(model: nn.Module, optimizer: Optimizer, groups: Groups) -> None:
    """Load the arrays of a checkpoint, or only weights.

    Args:
        model: the model that gets the weights.
        optimizer: the optimizer that gets the state, if ``groups`` has the group "optimizer".
        groups: arrays by group and name.

    Raises:
        ValueError: an array does not fit.
    """
    load_model(model, groups["model"])
    load_optimizer(model, optimizer, groups.get("optimizer", {}))


def model_arrays(model: nn.Module) -> Arrays:
    """Return the model's weights and buffers as arrays, by name."""
    return {name: _array(name, tensor) for name, tensor in model.state_dict().items()}


def frozen_arrays(model: nn.Module) -> Arrays:
    """Return the bits of each weight and buffer of the model's state_dict that has no gradient, by name.

    Ranks compare these arrays, so a tensor on a GPU is only represented by a checksum, int64 [1], computed there.
    """
    tensors = model.state_dict(keep_vars=True)
    return {name: _bits(tensor.detach()) for name, tensor in tensors.items() if not tensor.requires_grad}


def _bits(tensor: Tensor) -> NDArray[Any]:
    """Return the bytes of a tensor on the CPU, or `sum_of_words` of a tensor on another device."""
    if tensor.device.type == "cpu":
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return sum_of_words(tensor).cpu().numpy()


def sum_of_words(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as words of at most 32 bits, int64 [1]. A flip of any bit changes the sum."""
    values = tensor.contiguous().reshape(-1)
    word = {1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)
    return values.view(word).sum(dtype=torch.int64).reshape(1)


def _array(name: str, tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array.

    Raises:
        NonRetryableError: numpy lacks the dtype, such as bfloat16.
    """
    try:
        return tensor.detach().cpu().contiguous().numpy()
    except TypeError as error:
        remedy = "keep weights in float32, and compute in it by autocast"
        raise NonRetryableError(f"{name} is {tensor.dtype}, which no checkpoint can hold: {remedy}") from error


def optimizer_arrays(model: nn.Module, optimizer: Optimizer) -> Arrays:
    """Return the optimizer's state as arrays named ``<parameter>.<key>``, such as ``conv1.weight.momentum_buffer``.

    Raises:
        NonRetryableError: a value is neither a scalar tensor nor a tensor with its parameter's shape and dtype, or
            as in `check_parameters`.
    """
    check_parameters(model, optimizer)
    arrays = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and not shape_mismatch_error(value, parameter):
                arrays[f"{name}.{key}"] = _array(f"{name}.{key}", value)
            elif value is not None:
                problem = f"{type(optimizer).__name__}'s {key} of {name} cannot be kept in a checkpoint"
                raise NonRetryableError(f"{problem}: use another optimizer")
    return arrays


def check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise NonRetryableError if the optimizer trains a parameter that is not part of the model."""
    own = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in own:
                problem = f"{type(optimizer).__name__} trains a parameter of shape {list(parameter.shape)}"
                remedy = "make it a parameter of the model, or take it out of the optimizer"
                raise NonRetryableError(f"{problem} that is not part of the model, so no checkpoint has it: {remedy}")


def load_model(model: nn.Module, arrays: Arrays) -> None:
    """Load arrays that `model_arrays` returned into the model.

    Raises:
        ValueError: a name, shape or dtype differs from the model's.
    """
    difference = state_dict_diff(arrays, model_arrays(model))
    if difference:
        raise ValueError(difference)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})


def load_optimizer(model: nn.Module, optimizer: Optimizer, arrays: Arrays) -> None:
    """Load arrays that `optimizer_arrays` returned into the optimizer.

    Args:
        model: the model whose parameters the optimizer updates.
        optimizer: the optimizer that gets the state.
        arrays: arrays by name, from `optimizer_arrays`.

    Raises:
        ValueError: an array does not fit its parameter.
    """
    parameters = dict(model.named_parameters())
    group_of = {}
    for group in optimizer.param_groups:
        group_of.update(dict.fromkeys(group["params"], group))
    for full_name, array in arrays.items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        parameter = parameters[name]
        value = torch.from_numpy(array)
        difference = shape_mismatch_error(value, parameter)
        if difference:
            raise ValueError(f"{full_name} is {difference}")
        # A counter such as Adam's ``step`` stays on the CPU, unless kernels on the parameter's device read it.
        is_counter = value.ndim < parameter.ndim or key == "step"
        is_read_by_kernels = any(map(group_of[parameter].get, ("fused", "capturable")))
        if is_read_by_kernels or not is_counter:
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value


def shape_mismatch_error(value: Tensor, parameter: Tensor) -> str | None:
    """Return the reason why ``value`` cannot be optimizer state of ``parameter``; None if it can."""
    if value.ndim == 0:
        return None
    if value.shape == parameter.shape and value.dtype == parameter.dtype:
        return None
    return f"{value.dtype} {list(value.shape)}, not {parameter.dtype} {list(parameter.shape)}"
