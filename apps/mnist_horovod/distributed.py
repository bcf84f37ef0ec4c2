"""Choose a rank's device, join the other ranks, and exchange bytes, numpy arrays and gradients with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from numpy.typing import NDArray
from options import NO_MPI
from samestep import ConfigError, log
from samestep.env import World
from samestep.options import Options
from samestep.torch import distributed as torch_distributed
from samestep.torch.distributed import generator as generator
from samestep.torch.distributed import set_threads as set_threads
from torch import Tensor, nn


def choose_device(requested: str, world: World) -> torch.device:
    """Return the CPU, or this rank's own GPU if this Horovod can send what is on it.

    Raises ConfigError if "cuda" is requested and impossible. Rank 0 warns if GPUs cannot be used with "auto".
    """
    gpus = torch.cuda.device_count()
    has_gpus = gpus >= (world.local_world_size or 1)
    if requested == "cpu" or not has_gpus or hvd.cuda_built():
        return torch_distributed.choose_device(requested, world)
    build = "HOROVOD_GPU_OPERATIONS=NCCL bash scripts/run_mnist_horovod.sh, where nvcc is, builds one with it"
    if requested == "cuda":
        raise ConfigError(f"--device cuda: this Horovod was built without CUDA: use --device cpu; {build}")
    if world.rank == 0:
        log.warning(f"this Horovod was built without CUDA: training on the CPU, not on {gpus} GPUs; {build}")
    return torch.device("cpu")


def backend(device: torch.device) -> str:
    """Return the name of the library that carries the gradients."""
    if device.type == "cuda" and hvd.nccl_built():
        return "nccl"
    return os.environ["HOROVOD_CPU_OPERATIONS"]  # which `rendezvous` chose


def run_metadata(device: torch.device, model: nn.Module) -> dict[str, Any]:
    """Return what decides a run's numbers beside its options, for the header of metrics.jsonl."""
    metadata = torch_distributed.run_metadata(device, model)
    return {"horovod": horovod.__version__, **metadata, "backend": backend(device)}


def rendezvous(world: World, device: torch.device, timeout: float, transport: str) -> None:
    """Join the other ranks of horovodrun or mpirun. A process without a launcher trains alone.

    Raises ConfigError if Horovod finds another number of ranks than the launcher started.
    """
    # Collectives give up later than the watchdog, which can name the missing rank.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(timeout) + 30)
    # By default Horovod fuses whatever is ready at one moment. From 3 ranks on, a gradient's place in the fused buffer
    # decides the order of its sum, so that two runs would end with different bits. Here all gradients of a step are one
    # group in a fixed order, and no other tensor may join it.
    os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
    if transport == "mpi" and not hvd.mpi_built():
        raise ConfigError(NO_MPI)
    # A Horovod with both would use MPI, for its control messages and for the tensors.
    os.environ["HOROVOD_CONTROLLER"] = transport
    os.environ["HOROVOD_CPU_OPERATIONS"] = transport
    # Otherwise Horovod's thread keeps a processor busy while Open MPI waits in it.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    hvd.init()  # collective
    size = hvd.size()
    if size != world.world_size:
        hvd.shutdown()
        start = "horovodrun --gloo"
        if transport == "mpi":
            start = "horovodrun --mpi, or the mpirun of its own MPI"
        raise ConfigError(
            f"{world.launcher} started {world.world_size} ranks, but Horovod found {size}: "
            f"with --transport {transport} it is started by {start}"
        )


def broadcast(content: bytes) -> bytes:
    """Return rank 0's ``content`` on every rank."""
    length = torch.tensor([len(content)])
    hvd.broadcast_(length, root_rank=0)  # collective
    received = torch.empty(int(length), dtype=torch.uint8)
    if content and hvd.rank() == 0:
        received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    hvd.broadcast_(received, root_rank=0)  # collective
    return received.numpy().tobytes()


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Return every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""
    own = torch.from_numpy(row.copy()).unsqueeze(0)
    rows: NDArray[Any] = hvd.allgather(own).numpy()  # collective
    return rows


def all_to_all(tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send each rank ``send[rank]`` values of ``tensor`` in turn; return the ``receive[rank]`` values of each."""
    received, _ = hvd.alltoall(tensor, torch.tensor(send, dtype=torch.int32))  # collective
    return received  # type: ignore[no-any-return]


def all_gather_tensor(tensor: Tensor) -> Tensor:
    """Return all ranks' ``tensor`` [k] as [world_size * k], in the order of ranks."""
    return hvd.allgather(tensor)  # type: ignore[no-any-return]  # collective


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return ``optimizer``, or with --gradients optimizer a Horovod optimizer with the same state.

    Horovod's optimizer starts to sum a gradient when `backward` has computed it, and waits for the sums in `step`.
    """
    if options.gradients == "group":
        return optimizer
    compressor = getattr(hvd.Compression, options.compression)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compressor, op=hvd.Sum)
    wrapped.load_state_dict(optimizer.state_dict())  # equal on all ranks; hvd.broadcast_optimizer_state loads a pickle
    return wrapped  # type: ignore[no-any-return]


def all_reduce_gradients(model: nn.Module, options: Options) -> None:
    """Replace each gradient by its sum over ranks: one group in a fixed order, so a resume ends with the same bits.

    With --gradients optimizer, the optimizer of `wrap` does it.
    """
    if options.gradients == "optimizer":
        return
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    compressor = getattr(hvd.Compression, options.compression)
    sums = hvd.grouped_allreduce(gradients, name="gradients", compression=compressor, op=hvd.Sum)  # collective
    for parameter, total in zip(parameters, sums):
        parameter.grad = total
