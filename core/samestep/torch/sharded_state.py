"""Save and restore tensors that are sharded over a device mesh, so that no rank needs memory for a full tensor.

A checkpoint stores the shape of the full tensor, and each rank writes its part. If several ranks hold the same part,
the first of them writes it. On a restore, each rank reads the part that it holds on the current mesh.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.sharded.tensors import Shape, StoredTensor, TensorShard

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # for dtypes that NumPy lacks
_OPTIMIZER_STATE = re.compile(r"state\.(\d+)\..+")  # name of an optimizer's tensor, with the parameter's number


def is_sharded(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing DTensor's module, because the import is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank holds.

    Attributes:
        offset: index of the part's first element in the full tensor.
        shape: shape of the part; a dimension may be 0.
        is_copy: whether a lower rank holds the same part.
    """

    offset: Shape
    shape: Shape
    is_copy: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the part from the full array."""
        return tuple(slice(begin, begin + length) for begin, length in zip(self.offset, self.shape))


@functools.lru_cache(maxsize=64)
def _has_rank_0(mesh: Any) -> bool:
    """Return whether rank 0 is on a mesh. The result is cached, because reading a mesh's ranks is slow."""
    return 0 in mesh.mesh.flatten().tolist()


def part_of(tensor: Any) -> Part:
    """Return this rank's part of a DTensor.

    Each axis of the mesh that shards a dimension divides this dimension as `torch.chunk` does. FSDP2 divides the shards
    of tensor parallelism further, and its placements have the attribute ``split_factor``.

    Raises:
        TypeError: the tensor contains sums that are not reduced yet.
    """
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    placements = tensor.placements
    order = sorted(range(mesh.ndim), key=lambda axis: hasattr(placements[axis], "split_factor"))
    offset = [0] * tensor.ndim
    shape = list(tensor.shape)
    is_copy = not _has_rank_0(mesh)
    for axis in order:
        coordinate = coordinates[axis]
        if placements[axis].is_replicate():
            is_copy = is_copy or coordinate > 0
            continue
        if placements[axis].is_partial():
            raise TypeError(f"a tensor is {placements[axis]} over the ranks, which a checkpoint cannot hold: reduce it")
        dim = placements[axis].dim
        length = -(-shape[dim] // mesh.size(axis))
        begin = min(coordinate * length, shape[dim])
        offset[dim] += begin
        shape[dim] = min(length, shape[dim] - begin)
    return Part(tuple(offset), tuple(shape), is_copy)


def to_array(value: Tensor) -> NDArray[Any]:
    """Return a tensor as an array, which may be a view of a CPU tensor.

    A dtype that NumPy lacks, such as bfloat16, becomes unsigned integers of the same width. A complex tensor becomes
    real, with a last dimension of 2.
    """
    flat = value.detach().cpu().contiguous().resolve_neg()
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat.resolve_conj())
    try:
        return np.asarray(flat.numpy())
    except (TypeError, RuntimeError):  # NumPy lacks the dtype, such as bfloat16 or float8
        return np.asarray(flat.view(_UNSIGNED[flat.element_size()]).numpy())


def shard_of(value: Any, rank: int) -> TensorShard:
    """Return the shard that this rank writes.

    Args:
        value: a DTensor, or an array that is the same on all ranks.
        rank: rank of this process.
    """
    if not is_sharded(value):
        return TensorShard(value, (0,) * value.ndim, value.shape, copy=rank != 0)
    part = part_of(value)
    values = to_array(value.to_local()).reshape(part.shape)
    return TensorShard(values, part.offset, tuple(value.shape), part.is_copy)


@dataclass(frozen=True)
class LocalPart:
    """The values of this rank's part of a stored tensor, and the DTensor to replace."""

    values: NDArray[Any]
    like: Any

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return the values as a DTensor with the mesh and the placements of ``like``."""
        from torch.distributed.tensor import DTensor

        flat = torch.from_numpy(self.values.reshape(-1).copy())
        local = flat.view(dtype).reshape(self.values.shape).to(self.like.device)
        settings: dict[str, Any] = {"shape": self.like.shape, "stride": self.like.stride(), "run_check": False}
        result: Tensor = DTensor.from_local(local, self.like.device_mesh, self.like.placements, **settings)
        return result


def local_parts(part: Any, own: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read the stored arrays of a program's part. For each array that is sharded now, read only this rank's part.

    Args:
        part: the model, the optimizer or another part.
        own: arrays and DTensors of the part's current state, by name.
        stored: arrays or `StoredTensor` objects, by name.

    Returns:
        Arrays, and a `LocalPart` for each sharded tensor, by name.

    Raises:
        ValueError: a sharded tensor has another shape now.
        NonRetryableError: a file cannot be read.
    """
    parameters = parameters_of(part)
    result: dict[str, Any] = {}
    for name, array in stored.items():
        shape = tuple(array.shape)
        like = own[name] if name in own else parameter_of_state(parameters, name, shape)
        if not is_sharded(like):
            result[name] = array.read() if isinstance(array, StoredTensor) else array
            continue
        if shape != tuple(like.shape):
            raise ValueError(f"{name} has shape {list(shape)} in the checkpoint, not {list(like.shape)}")
        place = part_of(like)
        values = array.read(place.offset, place.shape) if isinstance(array, StoredTensor) else array[place.slices]
        result[name] = LocalPart(np.asarray(values), like)
    return result


def parameters_of(part: Any) -> list[Any]:
    """Return the parameters of an optimizer in the order of the numbers in its state_dict; [] for other parts."""
    if not isinstance(part, torch.optim.Optimizer):
        return []
    parameters = []
    for group in part.param_groups:
        parameters += group["params"]
    return parameters


def parameter_of_state(parameters: list[Any], name: str, shape: Shape) -> Any:
    """Return the parameter that is sharded like a tensor of an optimizer's state; None if no parameter is.

    Args:
        parameters: parameters of the optimizer, from `parameters_of`.
        name: name of the tensor, such as "state.0.exp_avg".
        shape: shape of the full tensor. A tensor is sharded like its parameter only if the shapes are equal.
    """
    match = _OPTIMIZER_STATE.fullmatch(name)
    if match is None or int(match[1]) >= len(parameters):
        return None
    parameter = parameters[int(match[1])]
    return parameter if tuple(parameter.shape) == shape else None
