"""Choose where a rank computes, join the other ranks, and exchange bytes and numpy arrays with them."""

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
"""Notes each collective while this rank waits in it, because MindSpore has no record of collectives. main() sets it."""


def choose_device(requested: str) -> None:
    """Compute on the CPU, or on this rank's own Ascend card, whose number is in DEVICE_ID.

    Args:
        requested: "cpu" or "ascend".
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    if requested == "ascend":
        ms.set_device("Ascend", int(os.environ.get("DEVICE_ID", "0")))
        return
    # With AVX-512, oneDNN computes a convolution of MindSpore's plain layout by its reference implementation, a slow
    # loop; with AVX2 it computes a matrix product, which is more than ten times faster.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    ms.set_device("CPU")
    ms.device_context.cpu.op_tuning.threads_num(_threads())  # the default is 25 per rank


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def backend(device: str) -> str:
    """Return the name of the library that carries the gradients."""
    if device == "ascend":
        return "hccl"
    return "mccl"


def run_metadata(device: str) -> dict[str, Any]:
    """Return what decides a run's numbers beside its options, for the header of metrics.jsonl."""
    return {
        "mindspore": ms.__version__,
        "device": device if device == "ascend" else processor(),
        "backend": backend(device),
        "threads": _threads(),
    }


def rendezvous(world: World, options: Options) -> None:
    """Join the other ranks that msrun or a rank table lists. A process without a launcher trains alone.

    Raises:
        ConfigError: MindSpore cannot join the ranks of this launcher, or it joined another number of ranks.
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
    """Run msrun's scheduler, through which the workers find each other and which never trains. End the process.

    By itself the scheduler notices only after 40 s that a worker was killed, and msrun waits for it. It holds Python's
    lock all that time. So it runs in a child process, and this process ends it with the last of the workers that msrun
    started on this machine.
    """
    _set_timeouts(options)
    scheduler = os.fork()
    if scheduler == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: at a Ctrl-C msrun kills the parent alone
        ms.set_device("CPU")
        try:
            init()  # until the workers have left
        except RuntimeError as problem:
            log.error(f"MindSpore's scheduler: {problem}")
            os._exit(1)
        os._exit(0)
    seen = _wait_for_workers(scheduler)
    with contextlib.suppress(ProcessLookupError):
        os.kill(scheduler, signal.SIGKILL)
    os._exit(0 if seen else 1)  # msrun has the exit codes of the workers


def _wait_for_workers(scheduler: int) -> bool:
    """Wait until msrun's workers on this machine, msrun or the process ``scheduler`` have ended.

    Returns whether there were workers.
    """
    this = psutil.Process()
    command = this.cmdline()
    msrun = this.parent()
    seen = False
    with contextlib.suppress(psutil.NoSuchProcess):  # msrun is gone
        while msrun and msrun.is_running() and os.waitpid(scheduler, os.WNOHANG) == (0, 0):
            time.sleep(0.2)
            others = [child for child in msrun.children() if child.pid != this.pid]
            has_workers = any(_command(child) == command for child in others)
            if seen and not has_workers:
                break
            seen = seen or has_workers
    return seen


def _set_timeouts(options: Options) -> None:
    """Let the watchdog, which names the rank that the others wait for, act before MindSpore and HCCL do.

    MindSpore ends a job after 30 s without a message. On Ascend, HCCL ends a job when a rank has waited 600 s for
    another to connect, or 1,836 s in a collective. Ranks connect after their first graph is compiled. MindSpore sets
    the first limit at its import, and HCCL accepts 120 to 7,200 s
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
    """Return every rank's ``row`` on every rank, bit for bit.

    Args:
        row: [k] of any dtype whose elements have 4 or 8 bytes. It travels as int32, because MindSpore's collectives do
            not support float64.

    Returns:
        [world_size, k] in the order of ranks, of the dtype of ``row``.
    """
    if _is_alone():
        return row.reshape(1, -1)
    with monitor.collective("all_gather"):
        words = np.ascontiguousarray(row).view(np.int32)
        gathered = ops.AllGather()(Tensor(words))  # collective
        rows: NDArray[Any] = gathered.asnumpy().view(row.dtype).reshape(get_group_size(), -1)
    return rows


def _is_alone() -> bool:
    return not GlobalComm.INITED or get_group_size() == 1


def summarize_error(message: str) -> str:
    """Return the line of an error message that names the cause.

    MindSpore's messages begin with rules, and with titles that end with ":".
    """
    lines = [line.strip() for line in message.splitlines() if any(map(str.isalnum, line))]
    causes = [line for line in lines if not line.endswith(":")]
    first, *_ = [*causes, *lines, ""]
    return first
