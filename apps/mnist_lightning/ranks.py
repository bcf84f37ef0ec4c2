"""How the ranks of this framework meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric.plugins import ClusterEnvironment
from model import Rows
from samestep import FatalError, UserError, env
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def meet(world: env.World, device: torch.device, timeout: float) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT, which torchrun sets; a single process needs no address."""
    # The watchdog, which can name the rank that is missing, is to speak before the collectives' own timeout.
    settings: dict[str, Any] = {
        "backend": backend(device),
        "timeout": timedelta(seconds=timeout + 30),
        "rank": world.rank,
        "world_size": world.world_size,
    }
    if world.launcher == "none":
        dist.init_process_group(store=dist.HashStore(), **settings)  # type: ignore[attr-defined]
        return
    if world.master_addr is None or world.master_port is None:
        raise UserError(f"{world.launcher} says no MASTER_ADDR and MASTER_PORT: set both, the same on every rank")
    try:
        dist.init_process_group(init_method="env://", **settings)  # ranks talk
    except dist.DistNetworkError as problem:
        place = f"{world.master_addr}:{world.master_port}"
        if "EADDRINUSE" in str(problem):
            raise UserError(f"MASTER_PORT {world.master_port} is in use on this machine: choose another") from problem
        raise FatalError(f"cannot meet the other ranks at {place}: {str(problem).splitlines()[0]}") from problem


def backend(device: torch.device) -> str:
    """What carries the gradients."""
    return "nccl" if device.type == "cuda" else "gloo"


def settle_buckets(ddp: DistributedDataParallel, images: Tensor, labels: Tensor) -> None:
    """Let DDP order its gradient buckets on passes over one sample that change nothing.

    It does so after the first backward pass, by the order in which gradients came. From 3 ranks on, the place of a
    gradient in its bucket decides the order of its summation, so a resumed run, whose first step came before the
    reordering, would not end with the same bits as one that was never interrupted.
    """
    for _ in range(2):  # the second forward pass is what applies the new order
        F.nll_loss(ddp(images, Rows(0, 1)), labels).backward()  # ranks talk
    ddp.zero_grad()


class Launched(ClusterEnvironment):
    """Who am I, for Lightning: what samestep read from the environment. Lightning then starts no process itself."""

    creates_processes_externally = True
    main_address = ""  # where ranks meet is of no use to Lightning: they have met
    main_port = 0

    def __init__(self, world: env.World) -> None:
        self.world = world

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self.world.world_size

    def global_rank(self) -> int:
        return self.world.rank

    def local_rank(self) -> int:
        return self.world.local_rank or 0

    def node_rank(self) -> int:
        return self.world.node_rank or 0

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass
