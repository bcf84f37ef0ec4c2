"""Join the other ranks, name and time every collective, and exchange results as JSON.

Every collective of this app runs inside ``with collective("its name"):``. The context sets the collective's name for
errors and the collective's time limit, and records timestamps.

Calls on a GPU return before their work is done, so each timestamp is read after `finish`. A collective begins when
this rank's computation is done, and ends when the collective's result is available. Other programs may queue a
collective earlier, while the computation still runs.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import samestep.torch.distributed as torch_distributed
import torch
import torch.distributed as dist
from options import APP
from samestep import NonRetryableError, env, log, rundir
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.root import Root
from samestep.stop import Stopped, StopRequest
from samestep.torch.distributed import all_gather, broadcast, choose_device

RENDEZVOUS_SECONDS = 60.0  # minimum time limit of the rendezvous, because Python starts slowly on a busy machine
REPORT_SECONDS = 10.0  # time limit to print an error after SIGTERM; torchrun kills the rank after 30 s


@dataclass
class Session:
    """The state of this process, which is one rank of the job."""

    world: env.World = field(default_factory=lambda: env.World(0, 1))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = RENDEZVOUS_SECONDS  # time limit of one collective in seconds (--timeout)
    pending: tuple[str, float, float] | None = None  # current collective: name, begin by time.monotonic(), limit in s
    failed: bool = False  # whether a collective has failed; the main thread then reports the failure
    events: list[tuple[str, float, float]] = field(default_factory=list)  # (name, begin, end) of completed collectives
    trace: IO[str] | None = None  # this rank's file of all events, with --trace
    condition: str = ""  # the condition that a command currently measures, for the trace


session = Session()


@contextmanager
def collective(name: str, limit: float | None = None) -> Iterator[None]:
    """Give the collective in the block a name and a time limit, and record the collective's timestamps.

    Args:
        name: name of the collective in errors and timelines.
        limit: time limit in seconds (default: --timeout).

    Raises:
        NonRetryableError: the collective failed. The message includes ``name``.
    """
    finish()
    begun = time.monotonic()
    session.pending = (name, begun, limit or session.timeout)
    try:
        yield
        finish()  # with NCCL, this call waits for the other ranks, and raises an exception after a failure
    except (RuntimeError, ValueError) as error:
        session.failed = True
        failure = f"{name} failed after {time.monotonic() - begun:.1f} s: {reason(error)}"
        raise NonRetryableError(f"rank {session.world.rank}: {failure}") from error
    finally:
        session.pending = None
    ended = time.monotonic()
    session.events.append((name, begun, ended))
    if session.trace:
        call = {"condition": session.condition, "collective": name, "before": begun, "after": ended}
        session.trace.write(json.dumps(call) + "\n")


def finish() -> None:
    """Wait until this rank's device has completed the work of its current stream.

    A strategy's all_reduce with async_op runs on another stream, and ``work.wait()`` makes the current stream wait for
    that all_reduce.
    """
    if session.device.type == "cuda":
        torch.cuda.current_stream(session.device).synchronize()


def reason(error: BaseException) -> str:
    """Return torch's error message without C++ source locations, and with the result of `missing_rank`, if any."""
    line = log.first_line(str(error)) or type(error).__name__
    text = re.sub(r"^\[.*?\] |\. This is typically caused.*", "", line)  # remove C++ source location and gloo's advice
    missing = missing_rank(text)
    return f"{text}: {missing}" if missing else text


def missing_rank(text: str) -> str:
    """Return an explanation of torch's message if another rank did not answer, otherwise ""."""
    if re.search("closed by peer|reset by peer|broken pipe", text, re.IGNORECASE):
        return "another rank has ended"
    if re.search("timed out|timeout", text, re.IGNORECASE):
        return "another rank is stopped, or never came"
    return ""


def _exit_on_signal(stopped: Stopped) -> None:
    """End this rank. After SIGTERM, log the pending collective first, because another rank may have failed."""
    if stopped.exit_code != 128 + signal.SIGTERM:
        os._exit(stopped.exit_code)
    deadline = time.monotonic() + 0.5
    while not (session.failed or session.pending) and time.monotonic() < deadline:
        time.sleep(0.01)  # the main thread may be between two collectives
    if session.failed:
        threading.main_thread().join(REPORT_SECONDS)  # the main thread reports the failure and ends the process
    elif session.pending:
        name, _, _ = session.pending
        log.error(
            f"rank {session.world.rank}: {name} was cut short: the launcher stopped this rank (TERM), as it does when "
            "another has failed"
        )
    os._exit(1)


def _watch_limits() -> None:
    """End this rank if a collective exceeds its time limit and the backend does not raise an error."""
    while True:
        time.sleep(0.1)
        pending = session.pending
        if not pending:
            continue
        name, since, limit = pending
        # Wait 1 s longer than the backend, because the backend's message has more details.
        if time.monotonic() - since > limit + 1:
            log.error(
                f"rank {session.world.rank}: {name} did not end within {limit:g} s: another rank is stopped, or never "
                "came"
            )
            os._exit(1)


def rendezvous(options: Options) -> tuple[env.World, torch.device]:
    """Join the other ranks, and choose a run dir unless --run-dir is given.

    Args:
        options: options of a command that runs on ranks. The function sets ``run_dir``.

    Returns:
        The rank and world size of this process, and its device.

    Raises:
        ConfigError: the environment or --device is invalid.
        NonRetryableError: another rank does not answer.
    """
    world = env.detect()
    session.world = world
    session.timeout = options.timeout
    if options.run_dir:  # set by the launch script
        log.start(options.run_dir, world.rank, options.quiet)
    # Threads handle stop signals and time limits, because the main thread may wait in C++.
    StopRequest(math.inf, _exit_on_signal).install()
    threading.Thread(target=_watch_limits, name="limits", daemon=True).start()
    device = choose_device(options.device, world)
    session.device = device
    limit = max(RENDEZVOUS_SECONDS, options.timeout)
    with collective("the rendezvous", limit):
        torch_distributed.rendezvous(world, device, limit - 30)  # the function adds 30 s to this limit
        dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=options.timeout))
    if options.run_dir is None:
        run_dir = ""
        if world.rank == 0:
            run_dir = str(rundir.new(APP))
        with collective("broadcast of the run dir"):
            options.run_dir = Path(broadcast(run_dir.encode()).decode())
        log.start(options.run_dir, world.rank, options.quiet)
    if options.trace:
        _open_trace(options)
    watchdog = Watchdog()  # ends this rank if its launcher ends; `collective` has its own time limits
    watchdog.start(world, Options(timeout=math.inf))
    watchdog.write_to(options.run_dir / "log")
    return world, device


def _open_trace(options: Options) -> None:
    """Open this rank's trace file in the run dir."""
    root = Root(options.run_dir)
    folder = f"trace-{options.command}-{session.world.world_size}"
    root.make_folder(folder)
    file = root.create(f"{folder}/rank-{session.world.rank}.jsonl")
    session.trace = io.TextIOWrapper(file, line_buffering=True)  # lines are complete even if the rank is killed


def gather_json(value: Any) -> list[Any]:
    """Return the values of all ranks on every rank, in rank order. Ranks send JSON instead of pickle."""
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with collective("all_gather of results"):
        lengths = all_gather(np.array([len(content)]))
        padding = int(lengths.max()) - len(content)
        rows = all_gather(np.pad(content, (0, padding), constant_values=ord(" ")))
    return [json.loads(row.tobytes()) for row in rows]


def gather_nonempty(value: list[Any]) -> dict[str, list[Any]]:
    """Return the nonempty lists of all ranks, by rank as a string, on every rank."""
    return {str(rank): each for rank, each in enumerate(gather_json(value)) if each}


def run_metadata(world: env.World, device: torch.device) -> dict[str, Any]:
    """Return the facts about software, machine and ranks that affect a measurement's results."""
    processors = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}",
        "processors": processors,
        "python": platform.python_version(),
        **torch_distributed.run_metadata(device),
        "launcher": world.launcher,
        "world_size": world.world_size,
        "node_count": world.node_count,
    }


def slowest_seconds(spans: list[tuple[float, float]]) -> list[float]:
    """Return the duration of each of m calls of a collective over all ranks.

    All ranks of one machine read the same clock. A call then lasts from the last rank's entry to the last rank's exit,
    so that the wait for a late rank does not count. The duration on several machines is the slowest rank's time.

    Args:
        spans: (begin, end) of each of this rank's m calls, by time.monotonic().

    Returns:
        Seconds [m], the same on every rank.
    """
    times = np.array(gather_json(spans))  # [world_size, m, 2]
    begins = times[:, :, 0]
    ends = times[:, :, 1]
    seconds = (ends - begins).max(0)
    if session.world.node_count == 1:
        seconds = ends.max(0) - begins.max(0)
    return [float(each) for each in seconds]
