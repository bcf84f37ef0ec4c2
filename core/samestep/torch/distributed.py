"""Choose a rank's device, join the other ranks, and exchange bytes and numpy arrays with them."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from samestep import ConfigError, NonRetryableError
from samestep.env import World, processor


def choose_device(requested: str, world: World) -> torch.device:
    """Return the CPU, or this rank's own GPU.

    On a GPU, torch then takes deterministic algorithms alone, for equal bits after a resume; an operation without one
    raises RuntimeError. Convolutions take float32, as on a CPU, not TF32.

    Args:
        requested: "cpu", "cuda", or "auto": a GPU if every rank of this machine has its own.
        world: this rank's place in the job.

    Raises:
        ConfigError: "cuda" is requested, and ranks would share GPUs.
    """
    gpus, ranks = torch.cuda.device_count(), world.local_world_size or 1
    if requested == "cuda" and gpus < ranks:
        problem = f"this machine has {gpus} GPUs for {ranks} ranks"
        raise ConfigError(f"--device cuda: {problem}: start fewer, or use --device cpu")
    if requested == "cpu" or gpus < ranks:
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic products need
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(device := torch.device("cuda", world.local_rank or 0))
    return device


def set_threads(threads: int | None) -> None:
    """Compute with ``threads`` threads, if given; otherwise torch reads OMP_NUM_THREADS."""
    torch.set_num_threads(threads or torch.get_num_threads())


def backend(device: torch.device, requested: str = "auto") -> str:
    """Return the name of the library that carries the gradients; for "auto", the one made for ``device``.

    Raises ConfigError if "nccl" is requested without a GPU.
    """
    if requested == "nccl" and device.type != "cuda":
        raise ConfigError("--backend nccl needs a GPU for each rank: start fewer ranks, or use --backend gloo")
    return requested if requested != "auto" else "nccl" if device.type == "cuda" else "gloo"


def run_metadata(device: torch.device) -> dict[str, Any]:
    """Return versions and settings that decide a run's numbers, for the header of metrics.jsonl.

    On a GPU, ``gpus`` is the number and the names of this machine's GPUs, and the versions of CUDA and NCCL.
    """
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": processor()}
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        gpus = f"{len(names)} x {' and '.join(sorted({*names}))}; CUDA {torch.version.cuda}; NCCL {nccl}"
        versions |= {"device": torch.cuda.get_device_name(device), "gpus": gpus}
    used = dist.get_backend() if dist.is_initialized() else backend(device)
    return {**versions, "backend": used, "threads": torch.get_num_threads()}


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that models draw from.

    To seed it is quicker than `torch.manual_seed`, which asks every kind of device: 0.3 ms a step on a CPU build.
    """
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def rendezvous(world: World, device: torch.device, timeout: float, requested: str = "auto") -> None:
    """Join the other ranks at MASTER_ADDR:MASTER_PORT. A process without a launcher trains alone.

    Args:
        world: this rank's place in the job.
        device: decides the backend, unless ``requested`` does.
        timeout: seconds without progress after which the watchdog acts; collectives give up 30 s later, so that the
            watchdog, which can name the missing rank, reports first.
        requested: "auto", or a backend by name.

    Raises:
        ConfigError: the launcher gives no address, the port is in use, or `backend`.
        NonRetryableError: the other ranks do not answer.
    """
    settings: dict[str, Any] = {"backend": backend(device, requested), "timeout": timedelta(seconds=timeout + 30)}
    settings |= {"rank": world.rank, "world_size": world.world_size}
    if world.launcher == "none":
        dist.init_process_group(store=dist.HashStore(), **settings)  # type: ignore[attr-defined]
        return
    if world.master_addr is None or world.master_port is None:
        raise ConfigError(f"{world.launcher} gives no MASTER_ADDR and MASTER_PORT: set both, the same on every rank")
    try:
        dist.init_process_group(init_method="env://", **settings)  # collective
    except dist.DistNetworkError as error:
        place, reason = f"{world.master_addr}:{world.master_port}", str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"MASTER_PORT {world.master_port} is in use on this machine: choose another") from error
        raise NonRetryableError(f"no rendezvous with the other ranks at {place}: {reason}") from error


def broadcast(content: bytes) -> bytes:
    """Return rank 0's ``content`` on every rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, src=0)  # collective
    received = torch.empty(int(length), dtype=torch.uint8, device=device)
    if content and dist.get_rank() == 0:
        received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(received, src=0)  # collective
    return received.cpu().numpy().tobytes()


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Return every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""
    local = torch.from_numpy(row.copy()).to("cuda" if dist.get_backend() == "nccl" else "cpu")
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)  # collective
    return np.stack([tensor.cpu().numpy() for tensor in gathered])


def last_collective() -> dict[str, Any] | None:
    """Return the first pending collective of this rank, else its last one; None if there was none.

    It comes from torch's flight recorder, which is on unless TORCH_FR_BUFFER_SIZE is 0, as ``name`` ("all_reduce 115
    [7] double"), ``number`` and ``pending``. The function is private to torch: the caller must expect any exception.
    """
    trace = torch._C._distributed_c10d._dump_fr_trace_json(True, False)  # type: ignore[attr-defined]
    entries = [entry for entry in json.loads(trace).get("entries", []) if not entry["is_p2p"]]
    if not entries:
        return None
    entry = next((entry for entry in entries if not entry["retired"]), entries[-1])
    number, kind = entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2]
    shapes, dtypes = "".join(map(str, entry["input_sizes"])), " ".join({*map(str.lower, entry["input_dtypes"])})
    return {"name": f"{kind} {number} {shapes} {dtypes}", "number": number, "pending": not entry["retired"]}
