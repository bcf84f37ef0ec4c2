"""Where a rank computes, how ranks rendezvous, and what they say about the run: bytes and numpy arrays."""

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
from samestep import UserError, log
from samestep.env import World
from samestep.options import Options
from samestep.run import processor


def choose_device(wanted: str) -> None:
    """The CPU, or this rank's own Ascend card, whose number DEVICE_ID holds."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if wanted == "ascend":
        ms.set_device("Ascend", int(os.environ.get("DEVICE_ID", "0")))
        return
    # With AVX-512, oneDNN answers MindSpore's plain layout with its reference convolution, a slow loop for checking
    # others; below that, with a matrix product, ten times as fast and more.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    ms.set_device("CPU")
    ms.device_context.cpu.op_tuning.threads_num(threads())  # 25 otherwise, in each rank


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def backend(device: str) -> str:
    """What carries the gradients."""
    return "hccl" if device == "ascend" else "mccl"


def facts(device: str) -> dict[str, Any]:
    """What makes a run's numbers, beside its options."""
    return {
        "mindspore": ms.__version__,
        "device": device if device == "ascend" else processor(),
        "backend": backend(device),
        "threads": threads(),
    }


def rendezvous(world: World, options: Options) -> None:
    """Join the other ranks where msrun or the rank table says; a process that no launcher started trains alone."""
    device = options.device
    if world.launcher == "none":
        return
    if world.launcher != "msrun" and (world.launcher, device) != ("rank table", "ascend"):
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks, which MindSpore cannot join on {device}: "
            "use msrun, or scripts/run_resnet50_mindspore.sh"
        )
    _leave_silence_to_the_watchdog(options)
    init()  # ranks talk
    if get_group_size() != world.world_size:
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks, of which MindSpore knows {get_group_size()}"
        )


def serve(options: Options) -> NoReturn:
    """Be msrun's scheduler, through which the workers find each other, and which never trains. Ends the process.

    Left to itself it takes 40 s to notice that a worker was killed, and msrun waits for it. It keeps Python's lock all
    that time, so it is a child process, and this one watches: it ends the scheduler with the last of the workers that
    msrun started on this machine.
    """
    _leave_silence_to_the_watchdog(options)
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
    me = psutil.Process()
    msrun, command, seen = me.parent(), me.cmdline(), False
    while msrun and msrun.is_running() and os.waitpid(scheduler, os.WNOHANG) == (0, 0):
        time.sleep(0.2)
        workers = [child for child in _children(msrun) if child.pid != me.pid and _command(child) == command]
        if seen and not workers:
            break
        seen = seen or bool(workers)
    with contextlib.suppress(ProcessLookupError):
        os.kill(scheduler, signal.SIGKILL)
    os._exit(0 if seen else 1)  # how the workers ended, msrun knows


def _leave_silence_to_the_watchdog(options: Options) -> None:
    """MindSpore ends a job after 30 s of silence, and names no rank: the watchdog, which does, is to come first.

    So would HCCL on Ascend: when a rank has waited for another to connect, which it does once its first graph is
    compiled, for 600 s (MindSpore sets them when it is imported; HCCL takes 120 to 7,200), and within a collective for
    1,836 s (https://www.hiascend.com/document/detail/en/canncommercial/850/commlib/hcclug/hcclug_000074.html).
    """
    longest = int(max(options.timeout, options.first_step_timeout)) + 60
    os.environ.setdefault("MS_NODE_TIMEOUT", str(longest))
    if os.environ.get("HCCL_CONNECT_TIMEOUT", "600") == "600":
        os.environ["HCCL_CONNECT_TIMEOUT"] = str(min(max(longest, 120), 7200))
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(max(longest, 1836)))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has ended, whether or not its parent has taken note."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def broadcast(content: bytes) -> bytes:
    """Rank 0's ``content`` on every rank."""
    if _alone():
        return content
    length = ops.Broadcast(0)((Tensor([len(content)], ms.int32),))[0]  # ranks talk
    length = int(length.asnumpy()[0])
    if length == 0:
        return b""
    words = np.frombuffer(content[:length].ljust(-(-length // 4) * 4, b"\0"), np.int32)
    received = ops.Broadcast(0)((Tensor(words),))[0]  # ranks talk
    return bytes(received.asnumpy().tobytes()[:length])


def all_gather(row: NDArray[Any]) -> NDArray[Any]:
    """Every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit.

    They travel as int32, because MindSpore's collectives have no float64. Elements have 4 bytes or 8.
    """
    if _alone():
        return row.reshape(1, -1)
    gathered = ops.AllGather()(Tensor(np.ascontiguousarray(row).view(np.int32)))  # ranks talk
    rows: NDArray[Any] = gathered.asnumpy().view(row.dtype).reshape(get_group_size(), -1)
    return rows


def _alone() -> bool:
    return not GlobalComm.INITED or get_group_size() == 1


def headline(message: str) -> str:
    """What one line can show of an error: MindSpore's messages begin with rules, and with titles that end with ":"."""
    lines = [line.strip() for line in message.splitlines() if any(map(str.isalnum, line))]
    return next((line for line in lines if not line.endswith(":")), lines[0] if lines else "")
