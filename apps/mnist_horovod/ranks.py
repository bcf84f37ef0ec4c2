"""Where a rank computes, how ranks rendezvous, and what they say about the run: bytes and numpy arrays."""

from __future__ import annotations

import os
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from numpy.typing import NDArray
from options import NO_MPI
from samestep import UserError, log
from samestep.env import World
from samestep.phases import Phases
from samestep.run import processor
from torch import nn
from torch.optim import Optimizer


def choose_device(wanted: str, world: World) -> torch.device:
    """The CPU, or this rank's own GPU. Raises UserError where ``cuda`` is asked for and cannot be had.

    ``auto`` means the GPU only where this Horovod can send what is on it; where ranks have GPUs that it cannot use,
    rank 0 warns.
    """
    gpus, ranks = torch.cuda.device_count(), world.local_world_size or 1
    if wanted == "cuda" and gpus < ranks:
        raise UserError(
            f"--device cuda: this machine has {gpus} GPUs for {ranks} ranks: start fewer, or use --device cpu"
        )
    if wanted == "cpu" or gpus < ranks:
        return torch.device("cpu")
    if not hvd.cuda_built():
        build = "HOROVOD_GPU_OPERATIONS=NCCL bash scripts/run_mnist_horovod.sh, where nvcc is, builds one with it"
        if wanted == "cuda":
            raise UserError(f"--device cuda: this Horovod was built without CUDA: use --device cpu; {build}")
        if world.rank == 0:
            log.warning(f"this Horovod was built without CUDA: training on the CPU, not on {gpus} GPUs; {build}")
        return torch.device("cpu")
    torch.backends.cudnn.deterministic = True  # a resumed run must end with the same bits
    device = torch.device("cuda", world.local_rank or 0)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """What carries the gradients."""
    if device.type == "cuda" and hvd.nccl_built():
        return "nccl"
    return os.environ["HOROVOD_CPU_OPERATIONS"]  # as `rendezvous` chose


def facts(device: torch.device) -> dict[str, Any]:
    """What makes a run's numbers, beside its options."""
    return {
        "horovod": horovod.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "backend": backend(device),
        "threads": torch.get_num_threads(),
    }


def generator(device: torch.device) -> torch.Generator:
    """What models draw from. torch.manual_seed asks every kind of device, which takes 0.3 ms a step where it cannot."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def rendezvous(world: World, device: torch.device, timeout: float, transport: str) -> None:
    """Join the other ranks where horovodrun or mpirun says; a process that no launcher started trains alone."""
    # The watchdog, which can name the rank that is missing, is to speak before the collectives' own timeout.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(timeout) + 30)
    # Horovod reduces together what is ready at one moment. From 3 ranks on, the place of a gradient among the others
    # decides the order of its summation, so no two runs would end with the same bits. A step's gradients are one group,
    # in one order, which nothing may join.
    os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
    if transport == "mpi" and not hvd.mpi_built():
        raise UserError(NO_MPI)
    # A Horovod that has both would take MPI, for what ranks agree on and for the tensors.
    os.environ |= {"HOROVOD_CONTROLLER": transport, "HOROVOD_CPU_OPERATIONS": transport}
    # Where Open MPI waits, in Horovod's own thread, it would keep from a processor what computes.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    hvd.init()  # ranks talk
    found = hvd.size()
    if found != world.world_size:
        hvd.shutdown()
        start = "horovodrun --gloo" if transport == "gloo" else "horovodrun --mpi, or the mpirun of its own MPI"
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks, of which Horovod knows {found}: "
            f"with --transport {transport} it is started by {start}"
        )


def broadcast(content: bytes) -> bytes:
    """Rank 0's ``content`` on every rank."""
    length = torch.tensor([len(content)])
    hvd.broadcast_(length, root_rank=0)  # ranks talk
    received = torch.empty(int(length), dtype=torch.uint8)
    if content and hvd.rank() == 0:
        received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    hvd.broadcast_(received, root_rank=0)  # ranks talk
    return received.numpy().tobytes()


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""
    rows: NDArray[Any] = hvd.allgather(torch.from_numpy(row.copy()).unsqueeze(0)).numpy()  # ranks talk
    return rows


def sum_gradients(model: nn.Module, optimizer: Optimizer, compression: Any) -> None:
    """Let each step of ``optimizer`` begin by adding up all ranks' gradients: one group, in one order."""
    parameters = list(model.parameters())

    def add_up(*step: Any) -> None:
        gradients = [parameter.grad for parameter in parameters]
        sums = hvd.grouped_allreduce(gradients, name="gradients", compression=compression, op=hvd.Sum)  # ranks talk
        for parameter, total in zip(parameters, sums):
            parameter.grad = total

    optimizer.register_step_pre_hook(add_up)


def time_phases(model: nn.Module, optimizer: Optimizer, phases: Phases) -> None:
    """Let ``phases`` know when a step's last gradient is there, and when its update begins and ends.

    Between the two the ranks add the gradients up.
    """
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: phases.end("computing"))
    optimizer.register_step_pre_hook(lambda *step: phases.end("waiting"))
    optimizer.register_step_post_hook(lambda *step: phases.end("optimizer"))
