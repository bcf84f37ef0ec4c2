"""This process's place among the ranks, and the collectives of the kit. Without other ranks, they do nothing."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import env

GATHER_MAX_BYTES = 2**22  # that rank 0 gathers at a time


class Place(NamedTuple):
    """The rank of this process, and the number of ranks."""

    rank: int
    world_size: int


def place() -> Place:
    """Return this process's place in the process group; without a job, rank 0 of 1.

    Raises:
        RuntimeError: a launcher started several ranks, but torch has no process group.
    """
    return Place(dist.get_rank(), dist.get_world_size()) if has_group() else _place_without_group()


def has_group() -> bool:
    """Return whether torch has a process group."""
    return dist.is_available() and dist.is_initialized()


@cache
def _place_without_group() -> Place:
    world = env.detect()
    if world.world_size > 1:
        raise RuntimeError(
            f"{world.launcher} started {world.world_size} ranks, but torch has no process group: call "
            "torch.distributed.init_process_group first, or pass rank= and world_size="
        )
    return Place(0, 1)


def collective_device() -> torch.device:
    """Return the device of the tensors that the process group takes."""
    if place().world_size > 1 and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use_gather(size: int) -> bool:
    """Return whether rank 0 sums tensors of ``size`` bytes: under gloo, while the number of messages costs most."""
    return dist.get_backend() == "gloo" and 1 < dist.get_world_size() <= GATHER_MAX_BYTES // max(1, size)


def ordered_all_reduce(tensor: Tensor) -> None:
    """Replace ``tensor`` by its sum over ranks, with the same bits on all of them.

    A ring passes 2 (p - 1) messages in turn at p ranks, however small they are. A small tensor goes to rank 0, which
    adds in the order of ranks, and back by a broadcast: 1 + log2(p) messages in turn.
    """
    if torch.compiler.is_compiling() or not use_gather(tensor.nbytes):  # a compiler cannot trace gather
        dist.all_reduce(tensor)  # collective
        return
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, gathered)  # collective
    for other in gathered[1:] if gathered else ():
        tensor += other
    dist.broadcast(tensor, src=0)  # collective


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_alone() -> bool:
    """Return whether there is one rank. A compiler takes the answer as constant, and does not trace `place`."""
    return place().world_size == 1


def all_reduce(tensor: Tensor) -> Tensor:
    """Replace ``tensor`` by its sum over ranks, in an order that no restart changes; return it."""
    if not is_alone():
        ordered_all_reduce(tensor)  # collective
    return tensor


def broadcast(content: bytes) -> bytes:
    """Return rank 0's ``content`` on every rank."""
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
