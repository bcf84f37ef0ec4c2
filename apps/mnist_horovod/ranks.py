"""How the ranks of this framework meet."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch
from samestep import UserError, env


def meet(world: env.World, device: torch.device, timeout: float) -> None:
    """Meet the other ranks where horovodrun says; a process that no launcher started trains alone."""
    # The watchdog, which can name the rank that is missing, is to speak before the collectives' own timeout.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(timeout) + 30)
    # Horovod reduces together what gradients are ready at one moment. From 3 ranks on, the place of a gradient among
    # them decides the order of its summation, so no two runs would end with the same bits: each is reduced alone.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    if device.type == "cuda" and not hvd.cuda_built():
        raise UserError(
            "this Horovod was built without CUDA: use --device cpu, or build it where nvcc is, "
            "HOROVOD_GPU_OPERATIONS=NCCL python apps/mnist_horovod/build_horovod.py"
        )
    hvd.init()  # ranks talk
    if hvd.size() != world.world_size:
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks, of which Horovod knows {hvd.size()}: use horovodrun"
        )


def backend(device: torch.device) -> str:
    """What carries the gradients."""
    if device.type == "cuda" and hvd.nccl_built():
        return "nccl"
    return "mpi" if hvd.mpi_enabled() else "gloo"
