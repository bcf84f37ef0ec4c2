"""Weights and optimizer state as arrays, under the names that all apps share, and back."""

from __future__ import annotations

import torch
from samestep import FatalError
from samestep.checkpoint import Arrays, mismatch
from samestep.run import Groups
from torch import Tensor, nn
from torch.optim import Optimizer


def groups(model: nn.Module, optimizer: Optimizer) -> Groups:
    """What a checkpoint holds. Raises FatalError for what `load` could not put back."""
    return {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}


def load(model: nn.Module, optimizer: Optimizer, groups: Groups) -> None:
    """The reverse of `groups`; also of weights alone. Raises ValueError for what does not fit."""
    load_model(model, groups["model"])
    load_optimizer(model, optimizer, groups.get("optimizer", {}))


def model_arrays(model: nn.Module) -> Arrays:
    """The weights under their canonical names, as arrays on the CPU: what checkpoints and model.safetensors hold."""
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in model.state_dict().items()}


def optimizer_arrays(model: nn.Module, optimizer: Optimizer) -> Arrays:
    """The optimizer's state as ``<parameter>.<key>``, such as ``conv1.weight.momentum_buffer``.

    Raises FatalError for an optimizer whose state is not made of scalars and of tensors like their parameters.
    """
    arrays = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or misfit(value, parameter):
                kind = type(optimizer).__name__
                raise FatalError(f"{kind}'s {key} of {name} cannot be kept in a checkpoint: use another optimizer")
            arrays[f"{name}.{key}"] = value.detach().cpu().contiguous().numpy()
    return arrays


def load_model(model: nn.Module, arrays: Arrays) -> None:
    """The reverse of `model_arrays`. Raises ValueError unless names, shapes and dtypes are the model's."""
    difference = mismatch(arrays, model_arrays(model))
    if difference:
        raise ValueError(difference)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})


def load_optimizer(model: nn.Module, optimizer: Optimizer, arrays: Arrays) -> None:
    """The reverse of `optimizer_arrays`. Raises ValueError unless each array fits its parameter."""
    parameters = dict(model.named_parameters())
    for full_name, array in arrays.items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        parameter, value = parameters[name], torch.from_numpy(array)
        difference = misfit(value, parameter)
        if difference:
            raise ValueError(f"{full_name} is {difference}")
        # Counters such as Adam's ``step`` stay on the CPU, where the optimizer made them.
        counts = value.ndim < parameter.ndim or key == "step"
        optimizer.state[parameter][key] = value if counts else value.to(parameter.device)


def misfit(value: Tensor, parameter: Tensor) -> str | None:
    """Why ``value`` cannot be optimizer state of ``parameter``, in words; None where it can."""
    if value.ndim == 0 or (value.shape == parameter.shape and value.dtype == parameter.dtype):
        return None
    return f"{value.dtype} {list(value.shape)}, not {parameter.dtype} {list(parameter.shape)}"
