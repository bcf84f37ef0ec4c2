"""Choose a rank's device, join the other ranks, and exchange bytes and NumPy arrays between ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Any, NoReturn

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, init
from numpy.typing import NDArray
from samestep import ConfigError, log
from samestep.env import World, processor
from samestep.monitor import Monitor
from samestep.options import Options

monitor = Monitor()
"""Monitor that records the collective in which this rank waits, because MindSpore keeps no record. main() sets it."""


def choose_device(requested: str) -> None:
    """Select the CPU ("cpu"), or the Ascend device whose number is in DEVICE_ID ("ascend")."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if requested == "ascend":
        ms.set_device("Ascend", int(os.environ.get("DEVICE_ID", "0")))
        return
    # MindSpore's plain layout makes oneDNN use a slow reference convolution with AVX-512. oneDNN with AVX2 uses a
    # matrix product, which is more than ten times faster.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    ms.set_device("CPU")
    ms.device_context.cpu.op_tuning.threads_num(_threads())  # the default is 25 per rank


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def backend(device: str) -> str:
    """Return the name of the library that reduces the gradients."""
    if device == "ascend":
        return "hccl"
    return "mccl"


def run_metadata(device: str) -> dict[str, Any]:
    """Return the facts about software and machine that affect a run's results, for the header of metrics.jsonl."""
    return {
        "mindspore": ms.__version__,
        "device": device if device == "ascend" else processor(),
        "backend": backend(device),
        "threads": _threads(),
    }


def rendezvous(world: World, options: Options) -> None:
    """Join the other ranks of msrun or of a rank table. A process without a launcher is a job of one rank.

    Raises:
        ConfigError: MindSpore does not support this launcher, or joined more or fewer ranks than the launcher started.
    """
    if world.launcher == "none":
        return
    started = f"{world.launcher} started {world.world_size} ranks"
    joins_by_table = world.launcher == "rank table" and options.device == "ascend"
    if world.launcher != "msrun" and not joins_by_table:
        raise ConfigError(
            f"{started}, which MindSpore cannot join on {options.device}: use msrun, or the launch script"
        )
    _set_timeouts(options)
    with monitor.collective("rendezvous"):
        init()  # collective
    if get_group_size() != world.world_size:
        raise ConfigError(f"{started}, but MindSpore joined {get_group_size()}: start all of them by one launcher")


def serve(options: Options) -> NoReturn:
    """Run msrun's scheduler until the workers on this machine have ended, then end the process.

    The workers connect through the scheduler, which does not train. The scheduler detects a killed worker only after
    40 s, and msrun waits for the scheduler. The scheduler also holds Python's global lock, so it runs in a child
    process. This process kills the child after the last worker has ended.
    """
    _set_timeouts(options)
    scheduler = os.fork()
    if scheduler == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, because msrun kills only the parent at Ctrl-C
        ms.set_device("CPU")
        try:
            init()  # returns when the workers have ended
        except RuntimeError as problem:
            log.error(f"MindSpore's scheduler: {problem}")
            os._exit(1)
        os._exit(0)
    seen = _wait_for_workers(scheduler)
    with contextlib.suppress(ProcessLookupError):
        os.kill(scheduler, signal.SIGKILL)
    os._exit(0 if seen else 1)  # msrun itself reads the workers' exit codes


def _wait_for_workers(scheduler: int) -> bool:
    """Wait until all workers of msrun on this machine have ended, or msrun or the process ``scheduler`` has ended.

    Returns:
        Whether msrun has started workers.
    """
    this = psutil.Process()
    command = this.cmdline()
    msrun = this.parent()
    seen = False
    with contextlib.suppress(psutil.NoSuchProcess):  # msrun has ended
        while msrun and msrun.is_running() and os.waitpid(scheduler, os.WNOHANG) == (0, 0):
            time.sleep(0.2)
            others = [child for child in msrun.children() if child.pid != this.pid]
            has_workers = any(_command(child) == command for child in others)
            if seen and not has_workers:
                break
            seen = seen or has_workers
    return seen


def _set_timeouts(options: Options) -> None:
    """Set timeouts of MindSpore and HCCL above the watchdog's, because the watchdog can identify the missing rank.

    MindSpore by default ends a job after 30 s without a message. HCCL on Ascend ends a job after a rank has waited
    600 s for a connection, or 1,836 s in a collective. Ranks connect after the compilation of their first graph.
    MindSpore sets HCCL_CONNECT_TIMEOUT to 600 at its import, and HCCL accepts 120 to 7,200 s
    (https://www.hiascend.com/document/detail/en/canncommercial/850/commlib/hcclug/hcclug_000074.html).
    """
    longest = int(max(options.timeout, options.first_step_timeout or 0.0)) + 60
    os.environ.setdefault("MS_NODE_TIMEOUT", str(longest))
    if os.environ.get("HCCL_CONNECT_TIMEOUT", "600") == "600":
        os.environ["HCCL_CONNECT_TIMEOUT"] = str(min(max(longest, 120), 7200))
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(max(longest, 1836)))


def _command(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or [] if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def broadcast(content: bytes) -> bytes:
    """Return rank 0's ``content`` on every rank."""
    if _is_alone():
        return content
    with monitor.collective("broadcast"):
        (lengths,) = ops.Broadcast(0)((Tensor([len(content)], ms.int32),))  # collective
        length = int(lengths.asnumpy()[0])
        if length == 0:
            return b""
        words = np.frombuffer(content[:length].ljust(-(-length // 4) * 4, b"\0"), np.int32)
        (received,) = ops.Broadcast(0)((Tensor(words),))  # collective
        return bytes(received.asnumpy().tobytes()[:length])


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Return the rows of all ranks on every rank, bit for bit.

    Args:
        row: array [k] whose elements have 4 or 8 bytes. Ranks send it as int32, because MindSpore's collectives do not
            support float64.

    Returns:
        Array [world_size, k] in rank order, with the dtype of ``row``.
    """
    if _is_alone():
        return row.reshape(1, -1)
    if not row.size:  # MindSpore's collectives reject empty tensors
        return np.empty((get_group_size(), 0), row.dtype)
    with monitor.collective("all_gather"):
        words = np.ascontiguousarray(row).view(np.int32)
        gathered = ops.AllGather()(Tensor(words))  # collective
        rows: NDArray[Any] = gathered.asnumpy().view(row.dtype).reshape(get_group_size(), -1)
    return rows


def _is_alone() -> bool:
    return not GlobalComm.INITED or get_group_size() == 1


def summarize_error(message: str) -> str:
    """Return the line of a MindSpore error message that describes the cause.

    The function skips separator lines, and titles, which end with ":".
    """
    lines = [line.strip() for line in message.splitlines() if any(map(str.isalnum, line))]
    causes = [line for line in lines if not line.endswith(":")]
    first, *_ = [*causes, *lines, ""]
    return first
