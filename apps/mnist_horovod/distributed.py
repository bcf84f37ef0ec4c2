"""Choose a rank's device, initialize Horovod, and exchange bytes, NumPy arrays and gradients between ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import horovod
import horovod.torch as hvd
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from options import NO_MPI
from samestep import ConfigError, log
from samestep.env import World
from samestep.options import Options
from samestep.torch import distributed as torch_distributed
from samestep.torch.distributed import generator as generator
from samestep.torch.distributed import set_threads as set_threads
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

VERSION: str = horovod.__version__


def choose_device(requested: str, world: World) -> torch.device:
    """Return the CPU, or this rank's GPU if Horovod's build supports CUDA.

    If ``requested`` is "auto" and Horovod cannot use the machine's GPUs, rank 0 logs a warning.

    Raises:
        ConfigError: ``requested`` is "cuda", and the machine has too few GPUs, or Horovod was built without CUDA.
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
    return torch_distributed.choose_device("cpu", world)


def backend(device: torch.device) -> str:
    """Return the name of the library that reduces the gradients."""
    if device.type == "cuda" and hvd.nccl_built():
        return "nccl"
    return os.environ["HOROVOD_CPU_OPERATIONS"]  # set by `rendezvous`


def run_metadata(device: torch.device, model: nn.Module) -> dict[str, Any]:
    """Return the facts about software and machine that affect a run's results, for the header of metrics.jsonl."""
    metadata = torch_distributed.run_metadata(device, model)
    return {"horovod": VERSION, **metadata, "backend": backend(device)}


def rendezvous(world: World, device: torch.device, timeout: float, transport: str) -> None:
    """Initialize Horovod with the ranks of horovodrun or mpirun. A process without a launcher is a job of one rank.

    Raises:
        ConfigError: ``transport`` is "mpi" and Horovod lacks MPI, or Horovod finds more or fewer ranks than started.
    """
    # Collectives time out after the watchdog, because only the watchdog can identify the missing rank.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(timeout) + 30)
    # Horovod by default fuses tensors that are ready at the same time. A gradient's position in the fused buffer
    # determines the order of its summation on 3 or more ranks, so two runs would end with different bits. The app
    # reduces all gradients of a step as one group in a fixed order, and this setting keeps other tensors out of the
    # group.
    os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
    if transport == "mpi" and not hvd.mpi_built():
        raise ConfigError(NO_MPI)
    # A Horovod with gloo and MPI would use MPI for control messages and tensors without these variables.
    os.environ["HOROVOD_CONTROLLER"] = transport
    os.environ["HOROVOD_CPU_OPERATIONS"] = transport
    # Open MPI would busy-wait in Horovod's thread without this variable, and occupy a processor.
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
    """Return the rows [k] of all ranks on every rank, as [world_size, k] in rank order, bit for bit."""
    own = torch.from_numpy(row.copy()).unsqueeze(0)
    rows: NDArray[Any] = hvd.allgather(own).numpy()  # collective
    return rows


def all_to_all(tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Exchange slices of a flat tensor [sum(send)], and return a tensor [sum(receive)] in rank order.

    This rank sends ``send[r]`` values to rank r, and receives ``receive[r]`` values from rank r.
    """
    received, _ = hvd.alltoall(tensor, torch.tensor(send, dtype=torch.int32))  # collective
    return received  # type: ignore[no-any-return]


def all_gather_tensor(tensor: Tensor) -> Tensor:
    """Return the tensors [k] of all ranks as [world_size * k], in rank order."""
    return hvd.allgather(tensor)  # type: ignore[no-any-return]  # collective


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return an hvd.DistributedOptimizer of the same parameters, or ``optimizer`` if --gradients is group.

    Horovod's optimizer starts the all-reduce of each gradient during `backward`. This optimizer begins with an empty
    state of its own, so load and save checkpoints with the returned optimizer.

    Raises:
        ConfigError: as in `check_batch_norms`.
    """
    # With virtual ranks, each sub-shard has its own statistics. An evaluation uses the running statistics.
    if not (options.virtual_ranks or options.evaluate_only):
        check_batch_norms(model)
    if options.gradients == "group":
        return optimizer
    compressor = getattr(hvd.Compression, options.compression)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compressor, op=hvd.Sum)
    return wrapped  # type: ignore[no-any-return]


def check_batch_norms(model: nn.Module) -> None:
    """Check that several ranks can compute the statistics of each batch norm.

    Raises:
        ConfigError: a batch norm is not frozen, and torch has no process group to reduce its statistics.
    """
    if hvd.size() == 1 or dist.is_initialized():
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ConfigError(
                f"{name} is a batch norm, which needs torch's process group, and Horovod has none: freeze it, or use "
                "GroupNorm"
            )


def all_reduce_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> AbstractContextManager[None]:
    """Replace gradients by their sums over ranks, and return the context in which to call `optimizer.step`.

    By default, Horovod's optimizer waits for the sums in `step`, too late for a program that clips gradients. Therefore
    this function waits for the sums, and the context prevents a second reduction in `step`. If --gradients is group,
    this function adds in a fixed order, so that a resumed run ends with the same bits.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:  # another rank may have a gradient
            parameter.grad = torch.zeros_like(parameter)
    if options.gradients == "optimizer":
        wrapped: Any = optimizer
        wrapped.synchronize()  # collective
        context: AbstractContextManager[None] = wrapped.skip_synchronize()
        return context
    gradients = [parameter.grad for parameter in trained]
    compressor = getattr(hvd.Compression, options.compression)
    sums = hvd.grouped_allreduce(gradients, name="gradients", compression=compressor, op=hvd.Sum)  # collective
    for parameter, total in zip(trained, sums):
        parameter.grad = total
    return nullcontext()
