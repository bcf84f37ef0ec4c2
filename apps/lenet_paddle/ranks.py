"""How the ranks of this framework meet, and what differs between its two APIs for a loop of one's own."""

from __future__ import annotations

import os
import socket
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.base import core
from paddle.distributed import collective, fleet
from paddle.optimizer import Optimizer
from samestep import UserError, env


def meet(api: str, world: env.World, device: str, timeout: float) -> None:
    """Meet the other ranks at the address that Paddle's launcher chose, or at MASTER_ADDR:MASTER_PORT."""
    # The watchdog, which can name the rank that is missing, is to speak before the collectives' own timeout.
    os.environ["PADDLE_PG_TIMEOUT"] = str(int(1000 * (timeout + 30)))  # milliseconds
    if device == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
    if world.launcher not in ("none", "paddle"):  # Paddle reads nobody's variables but its own
        if world.master_addr is None or world.master_port is None:
            raise UserError(f"{world.launcher} says no MASTER_ADDR and MASTER_PORT: set both, the same on every rank")
        endpoint = f"{world.master_addr}:{world.master_port}"
        os.environ |= {"PADDLE_TRAINER_ID": str(world.rank), "PADDLE_TRAINERS_NUM": str(world.world_size)}
        os.environ |= {"PADDLE_MASTER": endpoint, "PADDLE_CURRENT_ENDPOINT": endpoint}
    if world.world_size == 1:  # Paddle makes no process group for a single rank
        return
    if api == "fleet":
        if device == "cpu":
            fresh_store()
        fleet.init(is_collective=True)  # ranks talk
    else:
        dist.init_parallel_env()  # ranks talk


def fresh_store() -> None:
    """Give the groups that fleet is going to make a store of their own.

    A gloo group leaves its ranks' addresses in the store under names that do not tell the group (Paddle 3.3.1). Fleet
    makes a second group of all ranks, for data parallelism; a rank that reads before the others have written finds
    addresses of the first one, and waits for ever: 5 of 40 starts on 3 ranks did.
    """
    dist.init_parallel_env()  # ranks talk
    host = dist.ParallelEnv().trainer_endpoints[0].split(":")[0]
    with socket.socket() as probe:
        probe.bind((host if dist.get_rank() == 0 else "", 0))
        port = paddle.to_tensor([probe.getsockname()[1]])
    dist.broadcast(port, src=0)  # ranks talk
    collective._set_default_store(core.TCPStore(host, port.item(), dist.get_rank() == 0, dist.get_world_size()))


def backend(device: str) -> str:
    """What carries the gradients."""
    return "gloo" if device == "cpu" else "nccl"


def distribute(api: str, model: nn.Layer, optimizer: Optimizer) -> tuple[nn.Layer, Any]:
    """Model and optimizer as the API wants them to be; rank 0's weights are everyone's afterwards."""
    if dist.get_world_size() == 1:  # DataParallel would only warn, and fleet fail (as of Paddle 3.3.1)
        return model, optimizer
    if api == "fleet":
        return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)  # ranks talk
    return paddle.DataParallel(model), optimizer  # ranks talk


def settle_buckets(parallel: nn.Layer, images: Tensor, labels: Tensor) -> None:
    """Let DataParallel order its gradient buckets on passes over one sample that change nothing.

    It does so after the first backward pass, by the order in which gradients came. From 3 ranks on, the place of a
    gradient in its bucket decides the order of its summation, so a resumed run, whose first step came before the
    reordering, would not end with the same bits as one that was never interrupted.
    """
    for _ in range(2):
        F.cross_entropy(parallel(images), labels).backward()  # ranks talk
    parallel.clear_gradients()


def all_reduce(tensor: Tensor) -> None:
    """Sum over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)  # ranks talk


def broadcast(tensor: Tensor) -> None:
    """Rank 0's values on every rank, in place."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0)  # ranks talk


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, all of one shape, in order of rank."""
    if dist.get_world_size() == 1:
        return [tensor]
    gathered: list[Tensor] = []
    dist.all_gather(gathered, tensor)  # ranks talk
    return gathered
