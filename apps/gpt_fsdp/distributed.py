"""Choose a rank's device, arrange the ranks as a mesh, and exchange bytes and numpy arrays with the other ranks."""

from __future__ import annotations

import contextlib
import ctypes

import torch
import torch.distributed as dist
from model import GPT
from options import Options, mesh_of
from samestep.env import World
from samestep.step_timer import COMMUNICATION, COMPUTE, OPTIMIZER, StepTimer
from samestep.torch import distributed as torch_distributed
from samestep.torch.distributed import all_gather, backend, broadcast, last_collective, rendezvous, run_metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

__all__ = ["all_gather", "backend", "broadcast", "last_collective", "rendezvous", "run_metadata"]

M_MMAP_THRESHOLD = -3  # of <malloc.h>


def choose_device(requested: str, world: World) -> torch.device:
    """Return the CPU, or this rank's GPU; see `samestep.torch.distributed.choose_device`."""
    device = torch_distributed.choose_device(requested, world)
    if device.type == "cpu":
        release_memory_early()
    return device


def release_memory_early() -> None:
    """Return memory of 2 MB and more, such as gathered weights, to the system as soon as it is free.

    By default the GNU C library learns to keep pieces of up to 32 MB, which a rank then holds beside what it needs.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has its own way
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**21)


def make_mesh(options: Options, device: torch.device) -> DeviceMesh:
    """Return the ranks as a grid (dp, tp); neighbors compute the same samples. Raises ConfigError; see --mesh."""
    sizes = mesh_of(options, dist.get_world_size())
    return init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))


def time_phases(model: GPT, optimizer: Optimizer, timer: StepTimer) -> None:
    """Let ``timer`` note when this rank waits for the others' parts of a block, and when its update begins and ends.

    FSDP gathers a block in a hook of its own before the block computes: one of ours runs before it, and one after.
    """
    for module in (model, *model.blocks):
        module.register_forward_pre_hook(lambda *call: timer.mark(COMPUTE), prepend=True)
        module.register_forward_pre_hook(lambda *call: timer.mark(COMMUNICATION))
    optimizer.register_step_pre_hook(lambda *step: timer.mark(COMMUNICATION))
    optimizer.register_step_post_hook(lambda *step: timer.mark(OPTIMIZER))
