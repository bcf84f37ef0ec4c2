"""Convert this rank's shards of weights and optimizer state to named arrays, and back."""

from __future__ import annotations

import torch
from samestep import NonRetryableError
from samestep.checkpoint import state_dict_diff
from samestep.sharded.tensors import ShardGroups, StoredGroups, StoredTensor, TensorShard
from samestep.torch.sharded_state import part_of
from samestep.torch.weights import check_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def groups(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> ShardGroups:
    """Return this rank's shards for a checkpoint: ``{"model": {name: shard}, "optimizer": {name: shard}}``.

    Raises:
        NonRetryableError: the optimizer has state that `load` cannot restore.
    """
    return {"model": model_shards(model, mesh), "optimizer": optimizer_shards(model, optimizer, mesh)}


@torch.no_grad()
def load(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh, stored_groups: StoredGroups) -> None:
    """Load this rank's shards from arrays that were saved at any mesh. The optimizer's arrays may be missing.

    Args:
        model: model that is sharded on ``mesh``.
        optimizer: the model's optimizer.
        mesh: mesh (dp, tp) of the ranks.
        stored_groups: stored arrays by group and name.

    Raises:
        ValueError: an array does not fit the model or the optimizer.
    """
    shards = model_shards(model, mesh)
    difference = state_dict_diff(stored_groups["model"], shards)
    if difference:
        raise ValueError(difference)
    for name, parameter in model.named_parameters():
        read_part(stored_groups["model"][name], parameter, mesh)
    parameters = dict(model.named_parameters())
    for full_name, stored in stored_groups.get("optimizer", {}).items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        parameter = parameters[name]
        shard = shards[name]
        if not stored.shape:  # Adam's step count of the parameter, which a fused Adam keeps on the parameter's device
            optimizer.state[parameter][key] = torch.from_numpy(stored.read()).to(parameter.device)
        elif stored.shape != shard.shape or stored.dtype != shard.dtype:
            raise ValueError(f"{full_name} is {stored.dtype} {[*stored.shape]}, not {shard.dtype} {[*shard.shape]}")
        else:
            state = torch.empty_like(parameter)
            read_part(stored, state, mesh)
            optimizer.state[parameter][key] = state


def read_part(stored: StoredTensor, tensor: Tensor, mesh: DeviceMesh) -> None:
    """Copy this rank's shard of a stored array into this rank's shard of ``tensor``."""
    local, offset, _ = place(tensor, mesh)
    array = stored.read(offset, tuple(local.shape))
    local.copy_(torch.from_numpy(array))


def model_shards(model: nn.Module, mesh: DeviceMesh) -> dict[str, TensorShard]:
    """Return this rank's shards of the weights by name. Shards on the CPU share memory with the model."""
    return {name: shard_of(parameter, mesh) for name, parameter in model.named_parameters()}


def optimizer_shards(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> dict[str, TensorShard]:
    """Return this rank's shards of the optimizer's state, by ``<parameter>.<key>``.

    Raises:
        NonRetryableError: a value is neither a scalar tensor nor a tensor of its parameter's shape, or as in
            `check_parameters`.
    """
    check_parameters(model, optimizer)
    shards = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not is_stored(value, parameter):
                raise NonRetryableError(
                    f"{type(optimizer).__name__}'s {key} of {name} cannot be kept in a checkpoint: use another "
                    "optimizer"
                )
            shards[f"{name}.{key}"] = shard_of(value, mesh)
    return shards


def is_stored(value: object, parameter: Tensor) -> bool:
    """Return whether ``value``, a value of the optimizer's state, is a scalar tensor or has the parameter's shape."""
    if not isinstance(value, Tensor):
        return False
    return not value.ndim or value.shape == parameter.shape


def shard_of(tensor: Tensor, mesh: DeviceMesh) -> TensorShard:
    """Return this rank's shard of ``tensor``, with an array on the CPU."""
    local, offset, is_copy = place(tensor, mesh)
    array = local.detach().cpu().contiguous().numpy()
    return TensorShard(array, offset, tuple(tensor.shape), is_copy)


def place(tensor: Tensor, mesh: DeviceMesh) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return this rank's shard of a tensor on ``mesh`` (dp, tp), its offset, and whether another rank writes it.

    A scalar that is not a DTensor is a step counter, which rank 0 writes.

    Raises:
        NonRetryableError: the tensor is neither a DTensor nor a scalar, or its shard has an unexpected shape.
    """
    if not isinstance(tensor, DTensor):
        if tensor.ndim:
            raise NonRetryableError(f"a tensor of shape {[*tensor.shape]} is whole on this rank: FSDP has gathered it")
        return tensor, (), any(mesh.get_coordinate() or ())
    part = part_of(tensor)
    local = tensor.to_local()
    if tuple(local.shape) != part.shape:
        raise NonRetryableError(
            f"a shard has the shape {[*local.shape]}, not {[*part.shape]}, which {tensor.placements} leaves of "
            f"{[*tensor.shape]}"
        )
    return local, part.offset, part.is_copy
