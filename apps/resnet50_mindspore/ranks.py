"""How the ranks of this framework meet."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, NoReturn

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, init
from numpy.typing import NDArray
from samestep import UserError, env, log


def meet(world: env.World, device: str) -> None:
    """Meet the other ranks where msrun or the rank table says; a process that no launcher started trains alone."""
    if world.launcher == "none":
        return
    if world.launcher != "msrun" and (world.launcher, device) != ("rank table", "ascend"):
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks, which MindSpore cannot join on {device}: "
            "use msrun, or scripts/run_resnet50_mindspore.sh"
        )
    init()  # ranks talk
    if get_group_size() != world.world_size:
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks, of which MindSpore knows {get_group_size()}"
        )


def serve() -> NoReturn:
    """Be msrun's scheduler, which brings the workers together and never trains. Returns by ending the process.

    Left to itself it takes 40 s to notice that a worker was killed, and msrun waits for it. It keeps Python's lock all
    that time, so a process of its own watches over it and ends it with the last of the workers that msrun started here.
    """
    scheduler = os.fork()
    if scheduler == 0:
        ms.set_device("CPU")
        try:
            init()  # until the workers have left
        except RuntimeError as problem:
            log.error(f"MindSpore's scheduler: {problem}")
            os._exit(1)
        os._exit(0)
    me = psutil.Process()
    msrun, mine, seen = me.parent(), me.cmdline(), False
    while msrun and msrun.is_running() and os.waitpid(scheduler, os.WNOHANG) == (0, 0):
        time.sleep(0.2)
        workers = [child for child in _children(msrun) if child.pid != me.pid and _command(child) == mine]
        if seen and not workers:
            break
        seen = seen or bool(workers)
    with contextlib.suppress(ProcessLookupError):
        os.kill(scheduler, signal.SIGKILL)
    os._exit(0 if seen else 1)  # how the workers ended, msrun knows


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


def backend(device: str) -> str:
    """What carries the gradients."""
    return "hccl" if device == "ascend" else "mccl"


def all_gather(row: NDArray[Any], world_size: int) -> NDArray[Any]:
    """This rank's ``row`` [k] and the others', [world_size, k] in the order of ranks, bit for bit.

    They travel as int32, because MindSpore's collectives have no float64. A row is 4 bytes, or a multiple of that.
    """
    if world_size == 1:
        return row.reshape(1, -1)
    gathered = ops.AllGather()(Tensor(np.ascontiguousarray(row).view(np.int32)))  # ranks talk
    rows: NDArray[Any] = gathered.asnumpy().view(row.dtype).reshape(world_size, -1)
    return rows


def broadcast(content: bytes, world_size: int) -> bytes:
    """Rank 0's bytes on every rank."""
    if world_size == 1:
        return content
    length = ops.Broadcast(0)((Tensor([len(content)], ms.int32),))[0]  # ranks talk
    length = int(length.asnumpy()[0])
    sent = np.frombuffer(content[:length].ljust(-(-length // 4) * 4, b"\0"), np.int32)
    received = ops.Broadcast(0)((Tensor(sent),))[0]  # ranks talk
    return bytes(received.asnumpy().tobytes()[:length])
