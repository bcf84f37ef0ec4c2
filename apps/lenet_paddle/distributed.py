"""Choose a rank's device, join the other ranks, exchange arrays, and make the steps the same at any number of ranks."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle import Tensor, nn
from samestep import ConfigError
from samestep.env import World, processor
from samestep.options import Options
from samestep.sharding import GlobalBatches
from samestep.step_timer import COMPUTE, StepTimer
from samestep.virtual_ranks import Node, nodes_of_ranks, push, tree_sum

DROPOUTS = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm, nn.BatchNorm1D, nn.BatchNorm2D, nn.BatchNorm3D, nn.SyncBatchNorm)
SELECTED_GPUS = "FLAGS_selected_gpus"  # variable that selects this rank's GPU; Paddle's launchers set it


def gpu_count() -> int:
    """Return the number of GPUs that Paddle can use on this machine. A CPU build can use none."""
    if not paddle.is_compiled_with_cuda():
        return 0
    return paddle.device.cuda.device_count()  # type: ignore[no-any-return]


def choose_device(requested: str, gpus: str | None, world: World) -> str:
    """Select the CPU or this rank's GPU, and return "cpu" or "gpu".

    A rank that has LOCAL_RANK but no LOCAL_WORLD_SIZE cannot determine the number of ranks on its machine. "auto" then
    requires a GPU for every rank of the job, so that all ranks choose the same device.

    Args:
        requested: "auto", "cpu" or "gpu".
        gpus: value of --gpus, with one GPU for each rank of this machine, or None.
        world: this rank's place in the job.

    Raises:
        ConfigError: "gpu" is requested, and the machine has too few GPUs; or the launcher ignored a list of GPUs.
    """
    if not paddle.is_compiled_with_cuda():
        check_launcher()
    available = gpu_count()
    ranks = ranks_on_machine(requested, world)
    if requested == "gpu" and available < ranks:
        refuse_gpus(gpus, world, available=available, ranks=ranks)
    if requested == "cpu" or available < ranks:
        threads = os.environ.get("OMP_NUM_THREADS")
        if threads:
            paddle.base.core.set_num_threads(int(threads))  # --threads may have set the variable after Paddle's import
        paddle.set_device("cpu")
        return "cpu"
    number = gpu_number(gpus, world)
    os.environ[SELECTED_GPUS] = number  # Paddle's rendezvous reads this variable
    # cuDNN must be deterministic, so that a resumed run ends with the same bits.
    paddle.set_flags({SELECTED_GPUS: number, "FLAGS_cudnn_deterministic": True})
    paddle.set_device(f"gpu:{number}")
    return "gpu"


def check_launcher() -> None:
    """Raise ConfigError if the command of Paddle's launcher lists GPUs, which the CPU build ignores."""
    ignored = launcher_gpus()
    if ignored:
        raise ConfigError(
            f"paddle.distributed.launch ignored {ignored}: this Paddle is the CPU build: "
            "install paddlepaddle-gpu, or use --nproc_per_node to train on the CPU"
        )


def ranks_on_machine(requested: str, world: World) -> int:
    """Return the number of GPUs that this machine must have before this rank may select a GPU."""
    if world.local_world_size is not None:
        return world.local_world_size
    if world.local_rank is None:
        return 1
    if requested == "auto":
        return world.world_size
    return world.local_rank + 1


def refuse_gpus(gpus: str | None, world: World, *, available: int, ranks: int) -> NoReturn:
    """Raise ConfigError, because this machine has too few GPUs for --device gpu or --gpus.

    Args:
        gpus: value of --gpus, or None.
        world: this rank's place in the job.
        available: number of GPUs of this machine.
        ranks: number of GPUs that the ranks need.
    """
    users = f"{ranks} ranks"
    if world.local_world_size is None and world.local_rank is not None:
        users = f"local rank {world.local_rank}"
    build = "" if paddle.is_compiled_with_cuda() else " (this Paddle is the CPU build)"
    option = f"--gpus {gpus}" if gpus else "--device gpu"
    raise ConfigError(
        f"{option}: this machine has {available} GPUs for {users}{build}: start fewer, or leave the option out"
    )


def launcher_gpus() -> str | None:
    """Return the option --selected_gpus=I,J from the parent process's command line, or None.

    If the parent is the launcher of Paddle's CPU build, it ignores this option and starts one rank.
    """
    with suppress(OSError, ValueError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
        options = words[: words.index(sys.argv[0])]  # the launcher's options; the program's options follow
        return next((word for word in options if word.startswith("--selected_gpus")), None)
    return None


def gpu_number(gpus: str | None, world: World) -> str:
    """Return the number of this rank's GPU among the visible GPUs, as text, such as "0"."""
    local_rank = world.local_rank or 0
    if gpus:
        own = gpus.split(",")[local_rank]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not visible:
            return own
        names = [gpu.strip() for gpu in visible.split(",")]
        return str(names.index(own))
    selected = os.environ.get(SELECTED_GPUS)
    if selected and world.launcher in ("none", "paddle"):
        first, *_ = selected.split(",")
        return first
    return str(local_rank)


def backend(device: str) -> str:
    """Return the name of the library that reduces the gradients."""
    if device == "gpu":
        return "nccl"
    return "gloo"


def run_metadata(device: str) -> dict[str, Any]:
    """Return the facts about software and machine that affect a run's results, for the header of metrics.jsonl."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    return {
        "paddle": paddle.__version__,
        "cuda": paddle.version.cuda(),
        "device": paddle.device.cuda.get_device_name() if device == "gpu" else processor(),
        "backend": backend(device),
        "threads": threads or len(os.sched_getaffinity(0)),
    }


def rendezvous(world: World, device: str, timeout: float, api: str) -> None:
    """Join the other ranks at the address that Paddle's launcher chose, or at MASTER_ADDR:MASTER_PORT.

    Args:
        world: this rank's place in the job. A single rank gets no process group.
        device: "cpu" for gloo, or "gpu" for NCCL.
        timeout: seconds without progress after which the watchdog reports a missing rank. NCCL, which cannot identify
            this rank, times out 30 s later.
        api: the value of --api.

    Raises:
        ConfigError: the launcher sets no MASTER_ADDR or no MASTER_PORT.
    """
    os.environ["PADDLE_PG_TIMEOUT"] = str(int(1000 * (timeout + 30)))  # milliseconds
    if device == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
    if world.launcher not in ("none", "paddle"):  # Paddle reads only its own variables
        if world.master_addr is None or world.master_port is None:
            raise ConfigError(
                f"{world.launcher} gives no MASTER_ADDR and MASTER_PORT: set both, the same on every rank"
            )
        endpoint = f"{world.master_addr}:{world.master_port}"
        os.environ["PADDLE_TRAINER_ID"] = str(world.rank)
        os.environ["PADDLE_TRAINERS_NUM"] = str(world.world_size)
        os.environ["PADDLE_MASTER"] = endpoint
        os.environ["PADDLE_CURRENT_ENDPOINT"] = endpoint
    if world.world_size == 1:
        return
    if api == "fleet":
        if device == "cpu":
            fresh_store()  # collective
        dist.fleet.init(is_collective=True)  # collective
    else:
        dist.init_parallel_env()  # collective


def fresh_store() -> None:
    """Join the other ranks, and create a second store for the groups that fleet creates.

    A gloo group stores its ranks' addresses under keys without the group's name (Paddle 3.3.1). Fleet creates a second
    group of all ranks. A rank that reads the keys early gets the first group's addresses and hangs. This happened in 5
    of 40 starts on 3 ranks.
    """
    dist.init_parallel_env()  # collective
    # spawn sets no PADDLE_MASTER, and other launchers set no endpoints. init_parallel_env finds rank 0 in the same way.
    endpoint = os.environ.get("PADDLE_MASTER") or dist.ParallelEnv().trainer_endpoints[0]
    host, *_ = endpoint.split(":")
    is_rank_0 = dist.get_rank() == 0
    with socket.socket() as probe:
        probe.bind((host if is_rank_0 else "", 0))
        port = paddle.to_tensor([probe.getsockname()[1]])
    dist.broadcast(port, src=0)  # collective
    store = paddle.base.core.TCPStore(host, port.item(), is_rank_0, dist.get_world_size())  # collective
    dist.collective._set_default_store(store)


def broadcast(content: bytes) -> bytes:
    """Return rank 0's ``content`` on every rank."""
    if dist.get_world_size() == 1:
        return content
    length = paddle.to_tensor([len(content)])
    dist.broadcast(length, src=0)  # collective
    if not length.item():
        return b""
    local = np.empty(length.item(), np.uint8)
    if dist.get_rank() == 0:
        local = np.frombuffer(content, np.uint8)
    received = paddle.to_tensor(local)
    dist.broadcast(received, src=0)  # collective
    return bytes(received.numpy())


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Return the rows [k] of all ranks on every rank, as [world_size, k] in rank order, bit for bit."""
    if dist.get_world_size() == 1:
        return row[None]
    gathered: list[Tensor] = []
    content = np.frombuffer(row.tobytes(), np.uint8)
    dist.all_gather(gathered, paddle.to_tensor(content))  # collective
    return np.stack([tensor.numpy().view(row.dtype) for tensor in gathered])


def all_reduce(tensor: Tensor) -> list[float]:
    """Sum ``tensor`` [k] over all ranks, in place, and return the sums."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)  # collective
    return list(map(float, tensor.tolist()))


def distribute(api: str, model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> tuple[nn.Layer, Any]:
    """Wrap model and optimizer for ``api``, "basic" or "fleet", and return both. All ranks get rank 0's weights."""
    if dist.get_world_size() == 1:  # DataParallel logs a warning for one rank, and fleet fails (Paddle 3.3.1)
        return model, optimizer
    if api == "fleet":
        return dist.fleet.distributed_model(model), dist.fleet.distributed_optimizer(optimizer)  # collective
    return paddle.DataParallel(model), optimizer  # collective


def check_layers(model: nn.Layer, options: Options, world_size: int) -> None:
    """Raise ConfigError, with the layer's name, if a layer would train differently at another number of ranks.

    A dropout draws a mask for one rank's rows. With --virtual-ranks, it draws a mask for each micro-batch, which is the
    same at any number of ranks. A batch norm computes the statistics of one rank's rows, or of one micro-batch.
    """
    if options.evaluate_only or (options.virtual_ranks or world_size) == 1:
        return
    for name, layer in model.named_sublayers(include_self=True):
        layer_name = f"{name or 'the model'} ({type(layer).__name__})"
        probability = layer.p if isinstance(layer, DROPOUTS) else getattr(layer, "dropout", 0)  # also LSTM, attention
        if not options.virtual_ranks and isinstance(probability, (int, float)) and probability > 0:
            raise ConfigError(
                f"{layer_name} drops other values at another number of ranks: set its probability to 0, use "
                "--virtual-ranks, or train on 1 rank"
            )
        # The app calls model.train() after an evaluation, so the layer's own eval() would not last.
        if isinstance(layer, BATCH_NORMS) and not layer._use_global_stats:
            raise ConfigError(
                f"{layer_name} computes statistics of one rank's samples: use GroupNorm, or freeze the statistics by "
                "use_global_stats=True"
            )


def seed_generators(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and Paddle with a 64-bit integer. Call this function before reading a batch."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # NumPy rejects larger seeds
    paddle.seed(seed)


class GradientTree:
    """Sum the gradients of a step's micro-batches in one fixed tree, with the same bits at any world size.

    The tree replaces DataParallel. The nodes of the tree are partial sums. Paddle's gloo has no all-to-all, so every
    rank receives and sums the nodes of all ranks. A rank receives at most (log2(micro-batches) + 1) * ranks times the
    size of the gradients. NumPy computes the sums on the host.
    """

    def __init__(self, model: nn.Layer, batches: GlobalBatches) -> None:
        self._parameters = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        self._batches = batches
        self._nodes: list[Node] = []
        self._dtype = self._parameters[0].numpy().dtype

    def add(self, micro_batch: tuple[int, int], *sums: Tensor) -> None:
        """Move a micro-batch's gradients from the parameters into the tree, with the micro-batch's scalar ``sums``."""
        k, count = micro_batch
        gradients = [parameter.grad.numpy().ravel() for parameter in self._parameters]
        scalars = [np.asarray(value.numpy(), self._dtype).reshape(1) for value in sums]
        row = np.concatenate([*gradients, *scalars])
        for parameter in self._parameters:
            parameter.clear_gradient(False)  # removes the gradient; adding to zeros would turn -0.0 into +0.0
        push(self._nodes, count, k, k + 1, row)

    def all_reduce(self, step: int, count: int) -> list[Tensor]:
        """Set ``.grad`` to the sums of all micro-batches' gradients, and return the sums of their ``count`` scalars.

        Only rank 0 returns these sums. Other ranks return zeros, so that a later sum over ranks counts the global batch
        once.
        """
        leaves = self._batches.num_micro_batches(step)
        world_size = self._batches.world_size
        layout = nodes_of_ranks(leaves, world_size)
        sizes = [parameter.size for parameter in self._parameters]
        most_nodes = max(map(len, layout))
        rows = np.zeros((most_nodes, sum(sizes) + count), self._dtype)
        for row, (_, _, value) in zip(rows, self._nodes):
            row[:] = value
        gathered = all_gather(rows.ravel())  # collective
        by_rank = gathered.reshape(world_size, *rows.shape)
        self._nodes = []
        values: list[NDArray[Any]] = []  # in leaf order
        for rank, ranges in enumerate(layout):
            values += list(by_rank[rank, : len(ranges)])
        total = tree_sum(leaves, layout, values)
        *gradients, scalars = np.split(total, np.cumsum(sizes))
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = paddle.to_tensor(gradient.reshape(parameter.shape))
        if self._batches.rank != 0:
            scalars = np.zeros_like(scalars)
        return [paddle.to_tensor(value) for value in scalars]


def fix_reduction_order(model: nn.Layer, backward: Callable[[], object]) -> None:
    """Make DataParallel order its gradient buckets before training, by two backward passes without an update.

    DataParallel orders the buckets after the first backward pass, by the order in which gradients were ready. The
    position of a gradient in its bucket determines the order of its summation on 3 or more ranks. The first step of a
    resumed run would otherwise use another order, and the run would end with different bits.

    Args:
        model: the network. The function restores its weights and buffers, and clears its gradients.
        backward: function that computes one forward and one backward pass of the distributed model.
    """
    # Paddle stores the running mean and variance of batch normalization as parameters.
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    for _ in range(2):
        backward()  # collective
    model.clear_gradients()
    for tensor, value in before:
        tensor.set_value(value)


def time_gradients(model: nn.Layer, timer: StepTimer) -> None:
    """Register hooks that end ``timer``'s compute phase at the last gradient. Later time counts as communication."""
    for parameter in (tensor for tensor in model.parameters() if not tensor.stop_gradient):
        parameter.register_hook(lambda gradient: timer.mark(COMPUTE))
