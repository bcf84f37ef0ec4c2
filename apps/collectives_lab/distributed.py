"""Join the other ranks, name and time every collective, and exchange results as JSON.

Every collective of this app runs inside ``with collective("its name"):``. The context gives it a name in the error that
ends a rank if the collective fails, a time limit, and the timestamps that timelines are made of.

On a GPU, calls return before their work is done, so each timestamp is read after `finish`. A collective begins when
this rank's computation is done and ends when its result is there. So a rank cannot queue work ahead of a collective
here, as it would in a program that is not measured.
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

RENDEZVOUS_SECONDS = 60.0  # Python starts slowly on a busy machine; --timeout applies after the rendezvous
REPORT_SECONDS = 10.0  # for one line on a busy machine; torchrun kills a rank 30 s after TERM


@dataclass
class Session:
    """The state of this process, which is one rank."""

    world: env.World = field(default_factory=lambda: env.World(0, 1))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = RENDEZVOUS_SECONDS  # seconds for one collective: --timeout
    pending: tuple[str, float, float] | None = None  # a collective, its begin by time.monotonic(), and its limit, in s
    failed: bool = False  # a collective has failed, and the main thread reports it
    events: list[tuple[str, float, float]] = field(default_factory=list)  # (name, begin, end) of those that are done
    trace: IO[str] | None = None  # with --trace, this rank's file of all events
    condition: str = ""  # the condition that a command measures now, for the trace


session = Session()


@contextmanager
def collective(name: str, limit: float | None = None) -> Iterator[None]:
    """Name, limit and time the collective inside.

    Args:
        name: what errors and timelines call it.
        limit: seconds that it may take; default: --timeout.

    Raises:
        NonRetryableError: the collective failed; one line with its name.
    """
    finish()
    begun = time.monotonic()
    session.pending = (name, begun, limit or session.timeout)
    try:
        yield
        finish()  # inside: with NCCL a rank waits for the others here, and a failure is raised here
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
    """Wait until this rank's device has done its work.

    Only the current stream counts. A strategy's all_reduce with async_op runs beside it. ``work.wait()`` then orders
    that all_reduce before the rest of the stream.
    """
    if session.device.type == "cuda":
        torch.cuda.current_stream(session.device).synchronize()


def reason(error: BaseException) -> str:
    """Return what torch reports, without source lines of C++, and with gloo's words explained."""
    line = log.first_line(str(error)) or type(error).__name__
    text = re.sub(r"^\[.*?\] |\. This is typically caused.*", "", line)  # the place in C++, and gloo's advice
    missing = missing_rank(text)
    return f"{text}: {missing}" if missing else text


def missing_rank(text: str) -> str:
    """Return what torch's message means if another rank did not answer, else ""."""
    if re.search("closed by peer|reset by peer|broken pipe", text, re.IGNORECASE):
        return "another rank has ended"
    if re.search("timed out|timeout", text, re.IGNORECASE):
        return "another rank is stopped, or never came"
    return ""


def _exit_on_signal(stopped: Stopped) -> None:
    """End this rank at once. A launcher sends TERM after another rank has failed: report the pending collective."""
    if stopped.exit_code != 128 + signal.SIGTERM:
        os._exit(stopped.exit_code)
    deadline = time.monotonic() + 0.5
    while not (session.failed or session.pending) and time.monotonic() < deadline:
        time.sleep(0.01)  # between two collectives of a loop
    if session.failed:
        threading.main_thread().join(REPORT_SECONDS)  # it ends the process
    elif session.pending:
        name, _, _ = session.pending
        log.error(
            f"rank {session.world.rank}: {name} was cut short: the launcher stopped this rank (TERM), as it does when "
            "another has failed"
        )
    os._exit(1)


def _watch_limits() -> None:
    """End this rank if a collective exceeds its limit, whatever the backend does."""
    while True:
        time.sleep(0.1)
        pending = session.pending
        if not pending:
            continue
        name, since, limit = pending
        # A little later than the backend's own limit, because the backend's message has more details.
        if time.monotonic() - since > limit + 1:
            log.error(
                f"rank {session.world.rank}: {name} did not end within {limit:g} s: another rank is stopped, or never "
                "came"
            )
            os._exit(1)


def rendezvous(options: Options) -> tuple[env.World, torch.device]:
    """Join the other ranks, and choose the run dir if the launch script has not.

    Args:
        options: the options of any command that runs on ranks; ``run_dir`` is set.

    Returns:
        This process's place among the ranks, and its device.

    Raises:
        ConfigError: the environment or --device cannot be right.
        NonRetryableError: the other ranks do not answer.
    """
    world = env.detect()
    session.world = world
    session.timeout = options.timeout
    if options.run_dir:  # the launch script decides it
        log.start(options.run_dir, world.rank, options.quiet)
    # Both work in threads, because the main thread may wait in C++.
    StopRequest(math.inf, _exit_on_signal).install()
    threading.Thread(target=_watch_limits, name="limits", daemon=True).start()
    device = choose_device(options.device, world)
    session.device = device
    limit = max(RENDEZVOUS_SECONDS, options.timeout)
    with collective("the rendezvous", limit):
        torch_distributed.rendezvous(world, device, limit - 30)  # it waits 30 s longer
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
    watchdog = Watchdog()  # ends a rank without a launcher; `collective` limits the waiting
    watchdog.start(world, Options(timeout=math.inf))
    watchdog.write_to(options.run_dir / "log")
    return world, device


def _open_trace(options: Options) -> None:
    """Open this rank's file of all events in the run dir."""
    root = Root(options.run_dir)
    folder = f"trace-{options.command}-{session.world.world_size}"
    root.make_folder(folder)
    file = root.create(f"{folder}/rank-{session.world.rank}.jsonl")
    session.trace = io.TextIOWrapper(file, line_buffering=True)  # a killed rank leaves all that it had done


def gather_json(value: Any) -> list[Any]:
    """Return every rank's ``value`` on every rank, in rank order. It is JSON, because pickle is never loaded."""
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with collective("all_gather of results"):
        lengths = all_gather(np.array([len(content)]))
        padding = int(lengths.max()) - len(content)
        rows = all_gather(np.pad(content, (0, padding), constant_values=ord(" ")))
    return [json.loads(row.tobytes()) for row in rows]


def gather_nonempty(value: list[Any]) -> dict[str, list[Any]]:
    """Return every rank's list, by rank, without those that are empty."""
    return {str(rank): each for rank, each in enumerate(gather_json(value)) if each}


def run_metadata(world: env.World, device: torch.device) -> dict[str, Any]:
    """Return what decides a measurement's numbers beside its options."""
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
    """Return how long each of m calls took over all ranks.

    On one machine all ranks read one clock, and a call lasts from the last rank's entry to the last rank's exit. The
    wait for a late rank does not count. Across machines it is the slowest rank's own time.

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
