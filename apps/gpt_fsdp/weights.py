"""Convert this rank's parts of weights and optimizer state to arrays, under the names that all apps share, and back."""

from __future__ import annotations

import torch
from samestep import NonRetryableError
from samestep.checkpoint import state_dict_diff
from samestep.sharded.tensors import ShardGroups, StoredGroups, TensorShard
from samestep.torch.sharded_state import part_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def groups(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> ShardGroups:
    """Return this rank's parts of a checkpoint. Raises NonRetryableError for state that `load` could not restore."""
    return {"model": model_shards(model, mesh), "optimizer": optimizer_shards(model, optimizer, mesh)}


@torch.no_grad()
def load(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh, stored_groups: StoredGroups) -> None:
    """Load what `groups` returned at any mesh, or weights alone. Raises ValueError if a part does not fit."""
    shards = model_shards(model, mesh)
    if difference := state_dict_diff(stored_groups["model"], shards):
        raise ValueError(difference)
    for name, parameter in model.named_parameters():
        local, offset, _ = place(parameter, mesh)
        local.copy_(torch.from_numpy(stored_groups["model"][name].read(offset, tuple(local.shape))))
    parameters = dict(model.named_parameters())
    for full_name, stored in stored_groups.get("optimizer", {}).items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        parameter, shard = parameters[name], shards[name]
        if not stored.shape:  # Adam counts its steps for each parameter; a fused one does so on the parameter's device
            optimizer.state[parameter][key] = torch.from_numpy(stored.read()).to(parameter.device)
        elif (stored.shape, stored.dtype) != (shard.shape, shard.dtype):
            raise ValueError(f"{full_name} is {stored.dtype} {[*stored.shape]}, not {shard.dtype} {[*shard.shape]}")
        else:
            state = torch.empty_like(parameter)
            local, offset, _ = place(state, mesh)
            local.copy_(torch.from_numpy(stored.read(offset, tuple(local.shape))))
            optimizer.state[parameter][key] = state


def model_shards(model: nn.Module, mesh: DeviceMesh) -> dict[str, TensorShard]:
    """Return this rank's parts of the weights: views if they are on the CPU."""
    return {name: shard_of(parameter, mesh) for name, parameter in model.named_parameters()}


def optimizer_shards(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> dict[str, TensorShard]:
    """Return this rank's parts of the optimizer's state as ``<parameter>.<key>``.

    Raises NonRetryableError if the state is not made of scalars and of tensors like their parameters.
    """
    shards = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or (value.ndim and value.shape != parameter.shape):
                state = f"{type(optimizer).__name__}'s {key} of {name}"
                raise NonRetryableError(f"{state} cannot be kept in a checkpoint: use another optimizer")
            shards[f"{name}.{key}"] = shard_of(value, mesh)
    return shards


def shard_of(tensor: Tensor, mesh: DeviceMesh) -> TensorShard:
    """Return this rank's part of ``tensor`` as an array on the CPU."""
    local, offset, is_copy = place(tensor, mesh)
    return TensorShard(local.detach().cpu().contiguous().numpy(), offset, tuple(tensor.shape), is_copy)


def place(tensor: Tensor, mesh: DeviceMesh) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return this rank's part of a tensor on ``mesh`` (dp, tp), its offset, and whether another rank owns the same.

    A plain tensor is a counter, which rank 0 owns.
    """
    if not isinstance(tensor, DTensor):
        if tensor.ndim:
            raise NonRetryableError(f"a tensor of shape {[*tensor.shape]} is whole on this rank: FSDP has gathered it")
        return tensor, (), any(mesh.get_coordinate() or ())
    part = part_of(tensor)
    local = tensor.to_local()
    if tuple(local.shape) != part.shape:
        expected = f"not {[*part.shape]}, which {tensor.placements} leaves of {[*tensor.shape]}"
        raise NonRetryableError(f"a shard has the shape {[*local.shape]}, {expected}")
    return local, part.offset, part.is_copy
