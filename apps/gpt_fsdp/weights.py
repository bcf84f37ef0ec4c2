"""Which part of each weight and of the optimizer's state this rank holds, under the names that all apps share."""

from __future__ import annotations

from typing import Any

import torch
from samestep import FatalError
from samestep.checkpoint import mismatch
from samestep.sharded import Piece, Pieces, Shards
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def groups(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> Pieces:
    """What a checkpoint holds, as far as this rank does. Raises FatalError for what `load` could not put back."""
    return {"model": model_pieces(model, mesh), "optimizer": optimizer_pieces(model, optimizer, mesh)}


@torch.no_grad()
def load(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh, shards: Shards) -> None:
    """The reverse of `groups`, of any mesh's; also of weights alone. Raises ValueError for what does not fit."""
    pieces = model_pieces(model, mesh)
    if difference := mismatch(shards["model"], pieces):
        raise ValueError(difference)
    for name, parameter in model.named_parameters():
        local, offset, _ = place(parameter, mesh)
        local.copy_(torch.from_numpy(shards["model"][name].read(offset, tuple(local.shape))))
    parameters = dict(model.named_parameters())
    for full_name, stored in shards.get("optimizer", {}).items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters:
            raise ValueError(f"{full_name} is not part of its optimizer state")
        parameter, whole = parameters[name], pieces[name]
        if not stored.shape:  # Adam counts its steps for each parameter
            optimizer.state[parameter][key] = torch.from_numpy(stored.read())
        elif (stored.shape, stored.dtype) != (whole.shape, whole.dtype):
            raise ValueError(f"{full_name} is {stored.dtype} {[*stored.shape]}, not {whole.dtype} {[*whole.shape]}")
        else:
            state = torch.empty_like(parameter)
            local, offset, _ = place(state, mesh)
            local.copy_(torch.from_numpy(stored.read(offset, tuple(local.shape))))
            optimizer.state[parameter][key] = state


def model_pieces(model: nn.Module, mesh: DeviceMesh) -> dict[str, Piece]:
    """This rank's parts of the weights: views where they are on the CPU."""
    return {name: piece(parameter, mesh) for name, parameter in model.named_parameters()}


def optimizer_pieces(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> dict[str, Piece]:
    """This rank's parts of the optimizer's state as ``<parameter>.<key>``.

    Raises FatalError for an optimizer whose state is not made of scalars and of tensors like their parameters.
    """
    pieces = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or (value.ndim and value.shape != parameter.shape):
                kind = type(optimizer).__name__
                raise FatalError(f"{kind}'s {key} of {name} cannot be kept in a checkpoint: use another optimizer")
            pieces[f"{name}.{key}"] = piece(value, mesh)
    return pieces


def piece(tensor: Tensor, mesh: DeviceMesh) -> Piece:
    local, offset, is_copy = place(tensor, mesh)
    return Piece(local.detach().cpu().contiguous().numpy(), offset, tuple(tensor.shape), is_copy)


def place(tensor: Tensor, mesh: DeviceMesh) -> tuple[Tensor, tuple[int, ...], bool]:
    """This rank's part of a tensor on ``mesh`` (dp, tp), where it begins in the whole, and: does another own the same?

    Tensor parallelism cuts first, then FSDP what that left, along the first axis, as `torch.chunk` does: parts of equal
    size, then a smaller one, then empty ones. A tensor that is no DTensor, a counter, is rank 0's.
    """
    cuts: dict[str, Any] = {}
    if isinstance(tensor, DTensor):
        cuts = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements))
    elif tensor.ndim:
        raise FatalError(f"a tensor of shape {[*tensor.shape]} is whole on this rank: FSDP has gathered it")
    offset, extent, is_copy = [0] * tensor.ndim, [*tensor.shape], False
    dp, tp = zip(mesh.get_coordinate() or (), mesh.shape)  # mesh["dp"] takes a millisecond
    for name, (coordinate, size) in (("tp", tp), ("dp", dp)):
        axis = getattr(cuts.get(name), "dim", None)
        if axis is None:  # it has the same on all ranks along here
            is_copy |= coordinate > 0
            continue
        length = -(-extent[axis] // size)
        begin = min(coordinate * length, extent[axis])
        offset[axis], extent[axis] = offset[axis] + begin, min(length, extent[axis] - begin)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if list(local.shape) != extent:
        raise FatalError(f"a part of shape {[*local.shape]} is not what {cuts} leaves of {[*tensor.shape]}: {extent}")
    return local, tuple(offset), is_copy
