"""Parts that the scripts share: ranks, examples, batches, the mean over samples, checkpoints, stop requests.

Each script is a small training program. It imports these parts, except the part that it demonstrates.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

COUNT = 51
BATCH = 16
STEPS = 12
EVERY = 3  # steps between checkpoints
PER_EPOCH = -(-COUNT // BATCH)
TESTED = 25
STOPPED = 128 + signal.SIGTERM
FOLDER = Path("checkpoints")
Batches = list[list[int]]


# --- ranks -----------------------------------------------------------------------------------------------------------


def launch(main: Callable[[], None], ends_with_launcher: bool = True) -> NoReturn:
    """Fork the ranks of ``python SCRIPT -n N``, forward TERM to them, and exit with the first failed rank's code.

    Args:
        main: the function that each rank runs.
        ends_with_launcher: whether the kernel kills the ranks when the launcher ends.
    """
    importlib.import_module("torch._dynamo")  # import this once here, not in each rank's optimizer
    size = int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size))
    ranks: set[int] = set()

    def send(number: int) -> None:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM))
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            if ends_with_launcher:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            _run(main, rank)
        ranks.add(pid)
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        ended = os.waitstatus_to_exitcode(status)
        if ended not in (0, STOPPED):
            send(signal.SIGKILL)
        code = code or (128 - ended if ended < 0 else ended)
    sys.exit(code)


def _run(main: Callable[[], None], rank: int) -> NoReturn:
    """Run ``main`` as ``rank`` in this forked process, then exit."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # skip Python's shutdown, which gloo's threads may abort


def connect(seconds: float = 15) -> tuple[int, int]:
    """Connect the ranks, and seed torch equally on all ranks. Return the rank and the world size."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    torch.manual_seed(7)
    return dist.get_rank(), dist.get_world_size()


# --- examples --------------------------------------------------------------------------------------------------------


def examples() -> TensorDataset:
    """Return the training examples: inputs [COUNT, 8] and targets [COUNT, 1], float32."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(COUNT, 8, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(8, 1, generator=generator))


def global_batches(epoch: int) -> Batches:
    """Return the global batches of ``epoch`` as lists of example indices, in the shuffled order of the epoch."""
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[first : first + BATCH] for first in range(0, COUNT, BATCH)]


def own_batches(step: int) -> Batches:
    """Return this rank's shards of the global batches, from ``step`` to the end of its epoch."""
    batches = global_batches(step // PER_EPOCH)[step % PER_EPOCH :]
    return [batch[dist.get_rank() :: dist.get_world_size()] for batch in batches]


def loader_at(step: int, data: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    """Return a loader of this rank's shards, from ``step`` to the end of its epoch.

    Args:
        step: number of the first step, from 0.
        data: the dataset; None for the training examples.
        options: arguments of the DataLoader.
    """
    return DataLoader(data or examples(), batch_sampler=own_batches(step), **options)


def global_mean(total: torch.Tensor, count: int) -> torch.Tensor:
    """Return a loss whose DDP-averaged gradient is the gradient of the mean loss over the samples of all ranks.

    Args:
        total: the sum of this rank's losses.
        count: the number of this rank's samples.
    """
    samples = torch.tensor(float(count))
    dist.all_reduce(samples)
    return total * dist.get_world_size() / samples


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients over ranks in place, as DDP does."""
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()


def evaluate(model: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the mean squared error over the first TESTED examples. Each example is evaluated on one rank."""
    own = Subset(Subset(examples(), range(TESTED)), range(dist.get_rank(), TESTED, dist.get_world_size()))
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(own, batch_size=8):
            total += (model(x) - y).pow(2).sum()
    dist.all_reduce(total)
    return float(total) / TESTED


def report(step: int, loss: torch.Tensor) -> None:
    """Print the step and its loss on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step} loss {float(loss.detach()):.4f}", flush=True)


# --- stop requests ---------------------------------------------------------------------------------------------------


class StopRequests:
    """Record a TERM to this rank, and let all ranks stop after the same step."""

    def __init__(self) -> None:
        self._asked = torch.zeros(())
        signal.signal(signal.SIGTERM, lambda *_: self._asked.fill_(1))

    def agreed(self) -> bool:
        """Return whether all ranks must stop now. Call this on all ranks after the same step."""
        asked = self._asked.clone()
        dist.all_reduce(asked)
        return bool(asked)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def pack(state: Mapping[str, Any]) -> bytes:
    """Return ``state`` as bytes: a SHA-256 digest, then the content of torch.save."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    return hashlib.sha256(content.getvalue()).digest() + content.getvalue()


def unpack(content: bytes) -> dict[str, Any] | None:
    """Return the state that `pack` wrote, or None if the bytes are damaged."""
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    state: dict[str, Any] = torch.load(io.BytesIO(content[32:]), weights_only=True)
    return state


def write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def save(step: int, **state: Any) -> None:
    """Save a checkpoint on rank 0, and delete all but the newest two."""
    if dist.get_rank() != 0:
        return
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / f"{step:04}.pt", pack({"step": step, **state}))
    for old in sorted(FOLDER.glob("[0-9]*.pt"))[:-2]:
        old.unlink()


def load() -> dict[str, Any] | None:
    """Return the state of the newest undamaged checkpoint, or None without a checkpoint."""
    for path in sorted(FOLDER.glob("[0-9]*.pt"), reverse=True):
        state = unpack(path.read_bytes())
        if state is not None:
            return state
        print(f"warning: {path} is damaged: it is not used", flush=True)
    return None
