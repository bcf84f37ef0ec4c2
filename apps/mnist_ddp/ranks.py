"""Where a rank computes, how ranks rendezvous, and what they say about the run: bytes and numpy arrays."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from samestep import FatalError, UserError
from samestep.env import World
from samestep.phases import Phases
from samestep.run import processor
from samestep.sharding import Rows
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

GATHERED = 2**22  # bytes that rank 0 may gather at a time


def choose_device(wanted: str, world: World) -> torch.device:
    """The CPU, or this rank's own GPU. Raises UserError when ``cuda`` is asked for and ranks would share GPUs."""
    gpus, ranks = torch.cuda.device_count(), world.local_world_size or 1
    if wanted == "cuda" and gpus < ranks:
        raise UserError(
            f"--device cuda: this machine has {gpus} GPUs for {ranks} ranks: start fewer, or use --device cpu"
        )
    if wanted == "cpu" or gpus < ranks:
        return torch.device("cpu")
    torch.backends.cudnn.deterministic = True  # a resumed run must end with the same bits
    device = torch.device("cuda", world.local_rank or 0)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """What carries the gradients."""
    return "nccl" if device.type == "cuda" else "gloo"


def facts(device: torch.device) -> dict[str, Any]:
    """What makes a run's numbers, beside its options."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "backend": backend(device),
        "threads": torch.get_num_threads(),
    }


def generator(device: torch.device) -> torch.Generator:
    """What models draw from. torch.manual_seed asks every kind of device, which takes 0.3 ms a step where it cannot."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def rendezvous(world: World, device: torch.device, timeout: float) -> None:
    """Join the other ranks at MASTER_ADDR:MASTER_PORT, which torchrun sets; a single process needs no address."""
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
        raise UserError(f"{world.launcher} gives no MASTER_ADDR and MASTER_PORT: set both, the same on every rank")
    try:
        dist.init_process_group(init_method="env://", **settings)  # ranks talk
    except dist.DistNetworkError as problem:
        place = f"{world.master_addr}:{world.master_port}"
        if "EADDRINUSE" in str(problem):
            raise UserError(f"MASTER_PORT {world.master_port} is in use on this machine: choose another") from problem
        raise FatalError(f"no rendezvous with the other ranks at {place}: {str(problem).splitlines()[0]}") from problem


def broadcast(content: bytes) -> bytes:
    """Rank 0's ``content`` on every rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, src=0)  # ranks talk
    received = torch.empty(int(length), dtype=torch.uint8, device=device)
    if content and dist.get_rank() == 0:
        received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(received, src=0)  # ranks talk
    return received.cpu().numpy().tobytes()


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""
    mine = torch.from_numpy(row.copy()).to("cuda" if dist.get_backend() == "nccl" else "cpu")
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)  # ranks talk
    return np.stack([each.cpu().numpy() for each in everyones])


def collectives() -> dict[str, Any] | None:
    """The collective that this rank called last, by name and number, or the first that is pending: for the watchdog.

    torch numbers them in its flight recorder, which is on unless TORCH_FR_BUFFER_SIZE is 0. It is asked for JSON, as
    its other form is a pickle. None where there was no collective.
    """
    told = torch._C._distributed_c10d._dump_fr_trace_json(True, False)  # type: ignore[attr-defined]
    entries = [entry for entry in json.loads(told).get("entries", []) if not entry["is_p2p"]]
    if not entries:
        return None
    entry = next((entry for entry in entries if not entry["retired"]), entries[-1])
    number, kind = entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2]
    shapes, dtypes = "".join(map(str, entry["input_sizes"])), " ".join({*map(str.lower, entry["input_dtypes"])})
    return {"name": f"{kind} {number} {shapes} {dtypes}", "number": number, "pending": not entry["retired"]}


def is_gathered(size: int) -> bool:
    """Whether rank 0 adds up what each rank has ``size`` bytes of: where messages count for more than bytes."""
    return dist.get_backend() == "gloo" and 1 < dist.get_world_size() <= GATHERED // max(1, size)


def add_up(*mine: Tensor) -> None:
    """An all-reduce: in place of each of ``mine`` the sum over ranks, the same bits on all of them.

    gloo's own is a ring, in which 2 (p - 1) messages wait for each other at p ranks, however small they are. A small
    tensor goes to rank 0, which adds up in the order of ranks, and back by a broadcast: there 1 + log2(p) do. Several,
    each [k], go as one, the way of the last; those of the largest items come first, as bytes must be aligned.
    """
    if not mine or torch.compiler.is_compiling() or not is_gathered(mine[-1].nbytes):
        for each in mine:  # which a compiler knows, but not gather
            dist.all_reduce(each)  # ranks talk
        return
    sent = mine[0] if len(mine) == 1 else torch.cat([each.view(torch.uint8) for each in mine])
    everyones = [torch.empty_like(sent) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(sent, everyones)  # ranks talk
    for other in everyones[1:] if everyones else ():
        for total, its in zip(parts(sent, mine), parts(other, mine)):
            total += its
    dist.broadcast(sent, src=0)  # ranks talk
    if len(mine) > 1:
        for each, total in zip(mine, parts(sent, mine)):
            each.copy_(total)


def parts(sent: Tensor, mine: tuple[Tensor, ...]) -> list[Tensor]:
    """What was ``sent``, seen as ``mine`` again."""
    if len(mine) == 1:
        return [sent]
    return [part.view(each.dtype) for part, each in zip(sent.split([each.nbytes for each in mine]), mine)]


def order_sums(ddp: DistributedDataParallel, phases: Phases, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Let gradients be added up in an order that no restart changes, so that a resumed run ends with the same bits.

    Those of a small model are added up in the order of ranks. In the ring that adds up others, their places in DDP's
    buckets decide, from 3 ranks on, and DDP orders its buckets after the first backward pass, by the order in which
    gradients came: here on passes over one sample that leave weights and buffers as they were.

    Returns a list. What it holds at a backward pass is added up along with a small model's gradients, and taken out.
    """
    along = list[Tensor]()
    if is_gathered(sum(parameter.nbytes for parameter in ddp.parameters())):
        ddp.register_comm_hook(None, lambda state, bucket: averaged(bucket.buffer(), along, phases))
        return along
    buffers = [buffer.clone() for buffer in ddp.buffers()]  # batch normalisation counts what it sees
    for _ in range(2):  # the second forward pass is what applies the new order
        F.nll_loss(ddp(images, Rows(0, 1)), labels).backward()  # ranks talk
    ddp.zero_grad()
    for buffer, before in zip(ddp.buffers(), buffers):
        buffer.copy_(before)
    return along


def averaged(mine: Tensor, along: list[Tensor], phases: Phases) -> Future[Tensor]:
    """What DDP expects of its communication hook: the mean over ranks of one bucket's gradients.

    What else ranks add up in this step goes ``along``, so that they need not wait for the slowest a second time. What
    it takes is waiting, although gradients of the next bucket, by which computing goes on, come later.
    """
    phases.end("computing")
    add_up(*along, mine)  # ranks talk
    along.clear()
    phases.end("waiting")
    mean: Future[Tensor] = Future()
    mean.set_result(mine.div_(dist.get_world_size()))
    return mean


def time_phases(model: nn.Module, optimizer: Optimizer, phases: Phases) -> None:
    """Let ``phases`` know when a step's last gradient is there, and when its update begins and ends.

    A gradient's hook comes before DDP's own, which may begin to reduce it; backward() returns when all are reduced.
    """
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: phases.end("computing"))
    optimizer.register_step_pre_hook(lambda *step: phases.end("waiting"))
    optimizer.register_step_post_hook(lambda *step: phases.end("optimizer"))
