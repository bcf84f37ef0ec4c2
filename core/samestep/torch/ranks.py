"""Provide this process's rank, and collectives that do not communicate if there is only one rank."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from samestep import env

GATHER_MAX_BYTES = 2**22  # maximum bytes that rank 0 gathers at a time
RANK_ARGUMENTS = ", or pass rank= and world_size="  # a remedy for callers that take these arguments
Group = Optional["dist.ProcessGroup"]  # None means all ranks
GroupOrAxis = Union["dist.ProcessGroup", DeviceMesh, None]


class Place(NamedTuple):
    """The rank of this process, and the world size."""

    rank: int
    world_size: int


def place(group: Group = None, other_remedy: str = "") -> Place:
    """Return this process's rank and the world size in a process group; (0, 1) without a process group.

    Args:
        group: the process group; None means all ranks.
        other_remedy: end of the error's message, if the caller can work without a group; for example `RANK_ARGUMENTS`.

    Raises:
        RuntimeError: a launcher started several ranks, but torch has no process group.
    """
    if has_group():
        return Place(dist.get_rank(group), dist.get_world_size(group))
    return _place_without_group(other_remedy)


def process_group(group: GroupOrAxis) -> Group:
    """Return the process group of ``group``, which may be a process group, an axis of a device mesh, or None.

    Raises:
        TypeError: ``group`` has another type.
        ValueError: a mesh has several axes, or this rank is not part of the group.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a device mesh of {group.ndim} axes: pass the one over which ranks take different data, such "
                "as group=mesh['dp']"
            )
        group = group.get_group()
    given: Any = group  # a program without type checks may pass any type
    if group is None or isinstance(given, dist.ProcessGroup):
        return group
    if given is dist.GroupMember.NON_GROUP_MEMBER:  # new_group returns this value on ranks outside the group
        raise ValueError(f"group does not contain rank {dist.get_rank()}: pass the group of this rank")
    raise TypeError(f"group is a {type(given).__name__}: pass a process group, or an axis such as mesh['dp']")


def has_group() -> bool:
    """Return whether torch has a process group."""
    return dist.is_available() and dist.is_initialized()


@cache
def _place_without_group(other_remedy: str) -> Place:
    world = env.detect()
    if world.world_size > 1:
        raise RuntimeError(
            f"{world.launcher} started {world.world_size} ranks, but torch has no process group: call "
            f"torch.distributed.init_process_group first{other_remedy}"
        )
    return Place(0, 1)


def collective_device() -> torch.device:
    """Return the device of tensors for the process group's collectives."""
    if place().world_size > 1 and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use_gather(size: int, group: Group = None) -> bool:
    """Return whether rank 0 should sum a tensor of ``size`` bytes.

    With gloo, a sum on rank 0 is faster for small tensors, because the time depends on the number of messages.
    """
    is_gloo = dist.get_backend(group) == "gloo"
    return is_gloo and 1 < dist.get_world_size(group) <= GATHER_MAX_BYTES // max(1, size)


def ordered_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace ``tensor`` by its sum over the ranks of a group, with the same bits on all ranks.

    This call is a collective. With p ranks, a ring needs 2 (p - 1) sequential messages, even for small tensors. For a
    small tensor, rank 0 gathers and adds in rank order, and broadcasts the sum. Gather and broadcast together need
    1 + log2(p) sequential messages.
    """
    if torch.compiler.is_compiling() or not use_gather(tensor.nbytes, group):  # torch.compile cannot trace gather
        dist.all_reduce(tensor, group=group)  # collective
        return
    rank, world_size = place(group)
    gathered = [torch.empty_like(tensor) for _ in range(world_size)] if rank == 0 else None
    dist.gather(tensor, gathered, group=group, group_dst=0)  # collective
    for other in gathered[1:] if gathered else ():
        tensor += other
    dist.broadcast(tensor, group=group, group_src=0)  # collective


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_alone() -> bool:
    """Return whether the world size is 1. torch.compile treats the result as a constant, and does not trace `place`."""
    return place().world_size == 1


def all_reduce(tensor: Tensor, group: Group = None) -> Tensor:
    """Replace ``tensor`` by its sum over the ranks of a group, in the same order in each start. Return ``tensor``."""
    if not is_alone():
        ordered_all_reduce(tensor, group)  # collective
    return tensor


def all_gather(row: NDArray[Any], group: Group = None) -> NDArray[Any]:
    """Gather the rows of all ranks on every rank. This call is a collective.

    Args:
        row: this rank's row [k], of any dtype that torch supports.
        group: process group of the ranks.

    Returns:
        The rows [world_size, k], in the order of ranks and with the same bits.
    """
    world_size = place(group).world_size
    if world_size == 1:
        return row[None]
    local = torch.from_numpy(row.copy()).to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    gathered = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(gathered, local, group=group)  # collective
    return np.stack([tensor.cpu().numpy() for tensor in gathered])


def broadcast(content: bytes) -> bytes:
    """Return rank 0's ``content`` on every rank. This call is a collective."""
    if place().world_size == 1:
        return content
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, src=0)  # collective
    received = torch.empty(int(length), dtype=torch.uint8, device=device)
    if content and dist.get_rank() == 0:
        received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(received, src=0)  # collective
    return received.cpu().numpy().tobytes()
