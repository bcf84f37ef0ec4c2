"""Inject the faults of the proof's rows. Python imports this file at its start if PYTHONPATH has the file's folder.

The variable GPU_PROOF_FAULTS has a JSON list of faults. Each fault has ``rank``, ``start`` (number of earlier starts of
the job), ``step``, ``kind`` and ``path``. At the beginning of the step, the ``kind`` of the fault decides what happens:

* ``kill``: The rank waits for ENTER_SECONDS, and then sends itself SIGKILL.
* ``stop``: The rank sends itself SIGSTOP.
* ``block``: The rank's main thread waits in C code forever, as a rank under NCCL waits for a lost peer.
* ``pause``: The rank writes the file ``path``, and waits for a stop signal.
* ``skip``: The rank does not join the next all-reduce that the program calls.
* ``graphs``: The rank changes torch.compile before the first step, so that torch.compile uses CUDA graphs.
* ``reseed``: The rank draws dropout from another seed than the other ranks, from this step on.

Each fault happens once in a job. The rest of the program is unchanged.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENTER_SECONDS = 0.5  # time for the other ranks to enter the all-reduce, in seconds
PAUSE_SECONDS = 60.0  # longest wait for the stop signal, in seconds

_faults = json.loads(os.environ.get("GPU_PROOF_FAULTS", "[]"))
_info = json.loads(os.environ.get("SAMESTEP_JOB_INFO", "{}"))
_rank = _info.get("rank", int(os.environ.get("RANK", "0")))  # in mnist_elastic, only the job info has the rank
_start = int(os.environ.get("SAMESTEP_RESTARTS", "0"))


def _kill(fault: dict[str, Any]) -> None:
    time.sleep(ENTER_SECONDS)
    Path(fault["path"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: dict[str, Any]) -> None:
    Path(fault["path"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)


def _block(fault: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call waits forever for the lock that the first call holds
        libc.pthread_mutex_lock(mutex)


def _pause(fault: dict[str, Any]) -> None:
    from samestep.stop import StopRequest

    (request,) = [found for found in gc.get_objects() if type(found) is StopRequest]
    Path(fault["path"]).touch()
    deadline = time.monotonic() + PAUSE_SECONDS
    while not request.number and time.monotonic() < deadline:
        time.sleep(0.02)


def _skip(fault: dict[str, Any]) -> None:
    dist: Any = sys.modules["torch.distributed"]
    all_reduce = dist.all_reduce

    def skip_once(*arguments: Any, **others: Any) -> Any:
        dist.all_reduce = all_reduce
        return SimpleNamespace(wait=lambda: None)  # result of an asynchronous all-reduce

    dist.all_reduce = skip_once


def _reseed(fault: dict[str, Any]) -> None:
    samplers: Any = sys.modules["samestep.torch.samplers"]
    seed_generators = samplers.seed_generators
    samplers.seed_generators = lambda seed: seed_generators(seed + 1 + _rank)


def _make_graphs() -> None:
    import torch

    framework: Any = torch
    compile_module = framework.compile

    def compile_to_graphs(*arguments: Any, options: dict[str, Any], **others: Any) -> Any:
        return compile_module(*arguments, options={**options, "triton.cudagraphs": True}, **others)

    framework.compile = compile_to_graphs


KINDS = {"kill": _kill, "stop": _stop, "block": _block, "pause": _pause, "skip": _skip, "reseed": _reseed}


def _arm(faults: list[dict[str, Any]]) -> None:
    from samestep.data.token_batches import TokenBatches
    from samestep.sharding import GlobalBatches

    _strike_before(faults, GlobalBatches, "indices")
    _strike_before(faults, TokenBatches, "plan")  # the sampler of token batches calls `plan` for each step


def _strike_before(faults: list[dict[str, Any]], batches: type, name: str) -> None:
    """Wrap the method ``name`` of ``batches``, which gets a step, so that the step's faults happen before the call."""
    method = getattr(batches, name)

    def method_with_faults(self: Any, step: int, *others: Any) -> Any:
        for fault in [fault for fault in faults if fault.get("step") == step]:
            faults.remove(fault)
            if not os.path.exists(fault["path"]):
                KINDS[fault["kind"]](fault)
        return method(self, step, *others)

    setattr(batches, name, method_with_faults)


# A rank's command line has train.py in its first two arguments. A launcher's command line has train.py only in later
# arguments.
_is_rank = any(argument.endswith("train.py") for argument in sys.orig_argv[1:3])
_own = [fault for fault in _faults if (fault["rank"], fault["start"]) == (_rank, _start)]
if _own and _is_rank:
    _arm(_own)
    if any(fault["kind"] == "graphs" for fault in _own):
        _make_graphs()
