"""Choose a rank's device, make the mesh of ranks, and exchange bytes and NumPy arrays between ranks."""

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

M_MMAP_THRESHOLD = -3  # constant of <malloc.h>


def choose_device(requested: str, world: World) -> torch.device:
    """Return the CPU or this rank's GPU, and call `release_memory_early` on the CPU."""
    device = torch_distributed.choose_device(requested, world)
    if device.type == "cpu":
        release_memory_early()
    return device


def release_memory_early() -> None:
    """Make malloc return freed blocks of 2 MiB or more, such as gathered weights, to the system immediately.

    The GNU C library by default raises this limit to up to 32 MiB, so a rank would keep memory that it does not use.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**21)


def make_mesh(options: Options, device: torch.device) -> DeviceMesh:
    """Return the mesh (dp, tp) of all ranks. Tensor-parallel ranks (tp) are consecutive, and compute the same samples.

    Raises:
        ConfigError: --mesh does not fit the number of ranks or heads.
    """
    sizes = mesh_of(options, dist.get_world_size())
    return init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))


def time_phases(model: GPT, optimizer: Optimizer, timer: StepTimer) -> None:
    """Register hooks by which ``timer`` measures FSDP's all-gathers in the forward pass, and the optimizer's update.

    FSDP gathers a block's weights in a forward pre-hook. This function adds a hook before FSDP's hook and a hook after
    FSDP's hook.
    """
    for module in (model, *model.blocks):
        module.register_forward_pre_hook(lambda *call: timer.mark(COMPUTE), prepend=True)
        module.register_forward_pre_hook(lambda *call: timer.mark(COMMUNICATION))
    optimizer.register_step_pre_hook(lambda *step: timer.mark(COMMUNICATION))
    optimizer.register_step_post_hook(lambda *step: timer.mark(OPTIMIZER))
