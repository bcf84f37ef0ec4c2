"""Choose a rank's device, join the process group, and provide the collectives of a `samestep.run.Run`."""

from __future__ import annotations

import ctypes
import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from samestep import ConfigError, NonRetryableError, log
from samestep.env import World, processor
from samestep.options import SHARED_GPU
from samestep.sharding import RANDOM_NUMBERS
from samestep.torch.ranks import all_gather as all_gather
from samestep.torch.ranks import broadcast as broadcast

SHARED_MEMORY = 0.9  # fraction of the GPU's memory that all ranks together may use with --share-gpu
CONTEXT_BYTES = 1.5e9  # memory of a rank's CUDA context
# NCCL's variables for --share-gpu; {} without the option. This dictionary is global because the environment is global.
_sharing: dict[str, str] = {}

# Parameters of mallopt(3), and their values in bytes.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**30
_MAX_MMAP_THRESHOLD = 2**25  # the largest value that glibc accepts on 64-bit machines


def choose_device(requested: str, world: World) -> torch.device:
    """Return the CPU or this rank's GPU. With --share-gpu, all ranks use the machine's first GPU.

    For the CPU, this function makes glibc keep freed memory. For a GPU, it restricts torch to deterministic algorithms,
    so that bits are equal after a resume. An operation without such an algorithm raises RuntimeError. Convolutions use
    float32 instead of TF32, as on a CPU.

    Args:
        requested: "cpu", "cuda", SHARED_GPU, or "auto", which uses GPUs if this machine has one for each of its ranks.
        world: rank, world size and launcher of this process.

    Raises:
        ConfigError: as in `gpu_use`, or a job on several machines uses --share-gpu.
        NonRetryableError: CUDA cannot start, for example with an old driver.
    """
    gpus = torch.cuda.device_count()
    ranks = world.local_world_size or 1
    use = gpu_use(requested, ranks, gpus)
    if use == "none":
        if requested == "auto" and gpus and world.rank == 0:
            noun = "GPU" if gpus == 1 else "GPUs"
            log.info(f"{ranks} ranks, {gpus} {noun}: --device auto takes the CPU; see --share-gpu")
        _keep_freed_memory()
        return torch.device("cpu")
    if use == "shared" and (world.node_count or 1) > 1:
        raise ConfigError(f"--share-gpu is for one machine, and this job has {world.node_count}: leave it out")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic matrix products
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.allow_tf32 = False
    index = 0 if use == "shared" else world.local_rank
    device = torch.device("cuda", index or 0)
    try:
        # Set the device before the rendezvous and `init_device_mesh`, which otherwise use LOCAL_RANK as a GPU's index.
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise NonRetryableError(f"CUDA cannot start: {log.first_line(str(error))}") from error
    if use == "shared":
        _share(device, world.rank, ranks)
    return device


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for later tensors. Without glibc, do nothing.

    By default, glibc returns the memory of large activations to the system in each step. The next step then waits while
    the system clears the memory again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def gpu_use(requested: str, ranks: int, gpus: int) -> str:
    """Return how the ranks of a machine use its GPUs: "none", "own" (one GPU per rank) or "shared".

    Args:
        requested: value of --device, or SHARED_GPU.
        ranks: number of ranks on this machine.
        gpus: number of GPUs on this machine.

    Raises:
        ConfigError: the machine has fewer GPUs than ranks for "cuda", or no GPU for SHARED_GPU.
    """
    if requested == SHARED_GPU:
        if gpus == 0:
            raise ConfigError("--share-gpu: torch finds no GPU here: use --device cpu")
        return "shared"
    if requested == "cuda" and gpus < ranks:
        problem = f"this machine has {gpus} GPUs for {ranks} ranks"
        raise ConfigError(f"--device cuda: {problem}: start fewer, or use --device cpu")
    if requested == "cpu" or gpus < ranks:
        return "none"
    return "own"


def sharing_variables(nccl: tuple[int, ...], rank: int) -> dict[str, str]:
    """Return the environment variables with which NCCL accepts several ranks on one GPU.

    NCCL rejects two ranks with the same host and GPU, unless NCCL_MULTI_RANK_GPU_ENABLE of NCCL 2.30 is set. Before
    NCCL 2.30, each rank therefore gets its own NCCL_HOSTID. The ranks communicate by the loopback interface. The ranks
    themselves set the variables, because a launch script cannot read NCCL's version, and a bare torchrun does not set
    the variables.

    Args:
        nccl: version of NCCL, such as (2, 28, 9).
        rank: rank of this process.
    """
    variables = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
    if nccl >= (2, 30):
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **variables}
    return {"NCCL_HOSTID": f"samestep-rank-{rank}", **variables}


def memory_fraction(total: float, ranks: int) -> float:
    """Return the fraction of a shared GPU's memory that torch may allocate in each rank.

    Args:
        total: memory of the GPU in bytes.
        ranks: number of ranks that share the GPU.

    Raises:
        ConfigError: no memory is left for a rank beside its CUDA context.
    """
    fraction = SHARED_MEMORY / ranks - CONTEXT_BYTES / total
    if fraction <= 0:
        raise ConfigError(f"--share-gpu: {ranks} ranks do not fit into {total / 1e9:.0f} GB of GPU memory: start fewer")
    return fraction


def _share(device: torch.device, rank: int, ranks: int) -> None:
    """Limit this process's GPU memory, and set NCCL's variables, for a GPU that several ranks share."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(total, ranks), device)
    _sharing.update(sharing_variables(nccl_version(), rank))
    os.environ.update(_sharing)
    log.remedies.append(_remedy)


def nccl_version() -> tuple[int, ...]:
    """Return torch's version of NCCL, such as (2, 28, 9); () without NCCL."""
    try:
        return tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return ()


def _remedy(message: str) -> str:
    """Return the remedy if an error's ``message`` shows that the shared GPU's memory is full, else ""."""
    if "out of memory" not in message:
        return ""
    return ": this rank's part of the GPU is full (--share-gpu): start fewer ranks"


def set_threads(threads: int | None) -> None:
    """Set torch's number of threads. With None, keep the number that torch has read from OMP_NUM_THREADS."""
    torch.set_num_threads(threads or torch.get_num_threads())


def backend(device: torch.device, requested: str = "auto") -> str:
    """Return the backend of the process group; "auto" means "nccl" on a GPU and "gloo" on the CPU.

    Raises:
        ConfigError: "nccl" is requested without a GPU.
    """
    if requested == "nccl" and device.type != "cuda":
        raise ConfigError("--backend nccl needs a GPU for each rank: start fewer ranks, or use --backend gloo")
    if requested != "auto":
        return requested
    return "nccl" if device.type == "cuda" else "gloo"


def run_metadata(device: torch.device, model: nn.Module | None = None) -> dict[str, Any]:
    """Return versions and settings that affect a run's numbers, for the header of metrics.jsonl.

    On a GPU, ``gpus`` contains the number and names of this machine's GPUs, and the versions of CUDA and NCCL. If
    ``model`` has a dropout, ``random_numbers`` is "by row", the method of `samestep.torch.exact`.
    """
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": processor()}
    modules = model.modules() if model is not None else ()
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in modules):
        versions[RANDOM_NUMBERS] = "by row"
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, nccl_version()))
        gpus = f"{len(names)} x {' and '.join(sorted({*names}))}; CUDA {torch.version.cuda}; NCCL {nccl}"
        versions |= {"device": torch.cuda.get_device_name(device), "gpus": gpus}
    used = dist.get_backend() if dist.is_initialized() else backend(device)
    return {**versions, "backend": used, "threads": torch.get_num_threads()}


def generator(device: torch.device) -> torch.Generator:
    """Return the generator from which models draw random numbers on ``device``.

    Seeding this generator is faster than `torch.manual_seed`, which checks all types of devices (0.3 ms on a CPU
    build).
    """
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def rendezvous(world: World, device: torch.device, timeout: float, requested: str = "auto") -> None:
    """Create the process group by a rendezvous at MASTER_ADDR:MASTER_PORT. A process without a launcher trains alone.

    Args:
        world: rank, world size and launcher of this process.
        device: device of this rank, which determines the backend if ``requested`` is "auto".
        timeout: seconds without progress after which the watchdog ends the rank. Collectives time out 30 s later, so
            that the watchdog, which can identify the missing rank, reports first.
        requested: "auto", or the name of a backend.

    Raises:
        ConfigError: as in `backend`, or the launcher gives no address, or the port is in use.
        NonRetryableError: the rendezvous with the other ranks failed, or NCCL rejects ranks that share a GPU.
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
        place = f"{world.master_addr}:{world.master_port}"
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"MASTER_PORT {world.master_port} is in use on this machine: choose another") from error
        raise NonRetryableError(f"no rendezvous with the other ranks at {place}: {reason}") from error
    if _sharing and dist.get_backend() == "nccl":
        _check_sharing(device)


def _check_sharing(device: torch.device) -> None:
    """Run one all-reduce, to check that NCCL accepts ranks that share a GPU.

    Raises:
        NonRetryableError: the all-reduce fails.
    """
    try:
        dist.all_reduce(torch.zeros(1, device=device))  # collective
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if dist.get_world_size() == 1:
            raise
        version = ".".join(map(str, nccl_version()))
        variables = " ".join(f"{name}={value}" for name, value in _sharing.items())
        reason = str(error).strip().splitlines()[-1]
        raise NonRetryableError(f"--share-gpu: NCCL {version} refuses it with {variables}: {reason}") from error


def last_collective() -> dict[str, Any] | None:
    """Return this rank's first pending collective, else its last collective; None without collectives.

    The source is torch's flight recorder, which is on unless TORCH_FR_BUFFER_SIZE is 0. Its functions are private to
    torch, so the caller must expect any exception.

    Returns:
        ``name``, such as "all_reduce 115 [7] double", ``number`` and ``pending``.
    """
    entries = _recorded("_dump_fr_trace_json") or _recorded("_dump_nccl_trace_json")  # NCCL has its own recorder
    if not entries:
        return None
    entry = next(filter(_is_pending, entries), entries[-1])
    number = entry["collective_seq_id"]
    kind = entry["profiling_name"].rpartition(":")[2]
    shapes = "".join(map(str, entry["input_sizes"]))
    dtypes = " ".join({*map(str.lower, entry["input_dtypes"])})
    return {"name": f"{kind} {number} {shapes} {dtypes}", "number": number, "pending": _is_pending(entry)}


def _recorded(function: str) -> list[dict[str, Any]]:
    """Return a recorder's collectives, the oldest first; [] if this build of torch has no such recorder."""
    dump = getattr(torch._C._distributed_c10d, function, None)
    if dump is None:
        return []
    entries = json.loads(dump(True, False)).get("entries", [])
    return [entry for entry in entries if not entry["is_p2p"]]


def _is_pending(entry: dict[str, Any]) -> bool:
    """Return whether a collective is incomplete. NCCL marks a completed collective as retired after a delay."""
    return not entry["retired"] and entry.get("state") != "completed"
