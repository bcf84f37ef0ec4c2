"""Where a rank computes, how ranks rendezvous, and what they say about the run: bytes and numpy arrays."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle import Tensor, nn
from paddle.base import core
from paddle.distributed import collective, fleet
from paddle.optimizer import Optimizer
from samestep import UserError
from samestep.env import World
from samestep.phases import Phases
from samestep.run import processor

SELECTED = "FLAGS_selected_gpus"  # by which Paddle's launchers tell each rank its GPU; others do not


def gpu_count() -> int:
    """The GPUs that this Paddle can use on this machine."""
    return paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0


def choose_device(wanted: str, gpus: str | None, world: World) -> str:
    """The CPU, or this rank's own GPU. Raises UserError when ``gpu`` is asked for and ranks would share GPUs.

    Where LOCAL_RANK is given without LOCAL_WORLD_SIZE, a rank knows of no others on its machine but those before it.
    ``auto`` takes the GPU only if there is one for every rank of the job, so that all ranks decide alike.
    """
    found, ranks = gpu_count(), world.local_world_size
    unknown = ranks is None and world.local_rank is not None
    if ranks is None:
        ranks = 1 if world.local_rank is None else world.world_size if wanted == "auto" else world.local_rank + 1
    if wanted == "gpu" and found < ranks:
        whose = f"local rank {world.local_rank}" if unknown else f"{ranks} ranks"
        build = "" if paddle.is_compiled_with_cuda() else " (this Paddle is the CPU build)"
        raise UserError(
            f"--device gpu: this machine has {found} GPUs for {whose}{build}: start fewer, or use --device cpu"
        )
    if wanted == "cpu" or found < ranks:
        paddle.set_device("cpu")
        return "cpu"
    number = gpu_number(gpus, world)
    os.environ[SELECTED] = number  # where Paddle's rendezvous looks for it
    paddle.set_flags({SELECTED: number})
    paddle.set_flags({"FLAGS_cudnn_deterministic": True})  # a resumed run must end with the same bits
    paddle.set_device(f"gpu:{number}")
    return "gpu"


def gpu_number(gpus: str | None, world: World) -> str:
    """Under which number CUDA knows this rank's GPU: its place among the visible ones."""
    local_rank, visible = world.local_rank or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        mine = gpus.split(",")[local_rank]
        return str([each.strip() for each in visible.split(",")].index(mine)) if visible else mine
    chosen = os.environ.get(SELECTED) if world.launcher in ("none", "paddle") else None
    return chosen.split(",")[0] if chosen else str(local_rank)


def backend(device: str) -> str:
    """What carries the gradients."""
    return "nccl" if device == "gpu" else "gloo"


def facts(device: str) -> dict[str, Any]:
    """What makes a run's numbers, beside its options."""
    return {
        "paddle": paddle.__version__,
        "cuda": paddle.version.cuda(),
        "device": paddle.device.cuda.get_device_name() if device == "gpu" else processor(),
        "backend": backend(device),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0)),
    }


def rendezvous(world: World, device: str, timeout: float, api: str) -> None:
    """Join the other ranks at the address that Paddle's launcher chose, or at MASTER_ADDR:MASTER_PORT."""
    # The watchdog, which can name the rank that is missing, is to speak before the collectives' own timeout.
    os.environ["PADDLE_PG_TIMEOUT"] = str(int(1000 * (timeout + 30)))  # milliseconds
    if device == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
    if world.launcher not in ("none", "paddle"):  # Paddle reads nobody's variables but its own
        if world.master_addr is None or world.master_port is None:
            raise UserError(f"{world.launcher} gives no MASTER_ADDR and MASTER_PORT: set both, the same on every rank")
        endpoint = f"{world.master_addr}:{world.master_port}"
        os.environ |= {"PADDLE_TRAINER_ID": str(world.rank), "PADDLE_TRAINERS_NUM": str(world.world_size)}
        os.environ |= {"PADDLE_MASTER": endpoint, "PADDLE_CURRENT_ENDPOINT": endpoint}
    if world.world_size == 1:  # Paddle makes no process group for a single rank
        return
    if api == "fleet":
        if device == "cpu":
            fresh_store()  # ranks talk
        fleet.init(is_collective=True)  # ranks talk
    else:
        dist.init_parallel_env()  # ranks talk


def fresh_store() -> None:
    """Give the groups that fleet is going to make a store of their own.

    A gloo group leaves its ranks' addresses in the store under names that do not name the group (Paddle 3.3.1). Fleet
    makes a second group of all ranks, for data parallelism; a rank that reads before the others have written finds
    addresses of the first one, and waits for ever: 5 of 40 starts on 3 ranks did.
    """
    dist.init_parallel_env()  # ranks talk
    # As init_parallel_env finds rank 0: spawn gives no PADDLE_MASTER, and launchers but Paddle's no endpoints.
    host = (os.environ.get("PADDLE_MASTER") or dist.ParallelEnv().trainer_endpoints[0]).split(":")[0]
    with socket.socket() as probe:
        probe.bind((host if dist.get_rank() == 0 else "", 0))
        port = paddle.to_tensor([probe.getsockname()[1]])
    dist.broadcast(port, src=0)  # ranks talk
    collective._set_default_store(core.TCPStore(host, port.item(), dist.get_rank() == 0, dist.get_world_size()))


def broadcast(content: bytes) -> bytes:
    """Rank 0's ``content`` on every rank."""
    if dist.get_world_size() == 1:
        return content
    length = paddle.to_tensor([len(content)])
    dist.broadcast(length, src=0)  # ranks talk
    if not length.item():
        return b""
    mine = np.frombuffer(content, np.uint8) if dist.get_rank() == 0 else np.empty(length.item(), np.uint8)
    received = paddle.to_tensor(mine)
    dist.broadcast(received, src=0)  # ranks talk
    sent: bytes = received.numpy().tobytes()
    return sent


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""
    if dist.get_world_size() == 1:
        return row[None]
    everyones: list[Tensor] = []
    dist.all_gather(everyones, paddle.to_tensor(np.frombuffer(row.tobytes(), np.uint8)))  # ranks talk
    return np.stack([each.numpy().view(row.dtype) for each in everyones])


def all_reduce(tensor: Tensor) -> None:
    """Sum over all ranks, in place; Paddle refuses to for a single one, which has no process group."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)  # ranks talk


def distribute(api: str, model: nn.Layer, optimizer: Optimizer) -> tuple[nn.Layer, Any]:
    """Model and optimizer as the API wants them to be; rank 0's weights are everyone's afterwards."""
    if dist.get_world_size() == 1:  # DataParallel would only warn, and fleet fail (as of Paddle 3.3.1)
        return model, optimizer
    if api == "fleet":
        return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)  # ranks talk
    return paddle.DataParallel(model), optimizer  # ranks talk


def order_sums(parallel: nn.Layer, images: Tensor, labels: Tensor) -> None:
    """Let DataParallel order its gradient buckets, on passes over one sample that leave the model as it was.

    It does so after the first backward pass, by the order in which gradients came. From 3 ranks on, the place of a
    gradient in its bucket decides the order of its summation, so a resumed run, whose first step came before the
    reordering, would not end with the same bits as one that was never interrupted.
    """
    with unchanged(parallel):
        for _ in range(2):
            F.cross_entropy(parallel(images), labels).backward()  # ranks talk


def time_gradients(model: nn.Layer, phases: Phases) -> None:
    """Let ``phases`` know when a step's last gradient is there; backward() goes on to reduce them over all ranks."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: phases.end("computing"))


@contextmanager
def unchanged(model: nn.Layer) -> Iterator[None]:
    """Passes in this context leave no gradients, and weights and buffers as they were."""
    # Paddle counts what batch normalisation keeps, running mean and variance, among the parameters.
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    model.clear_gradients()
    for tensor, value in zip(tensors, before):
        tensor.set_value(value)
