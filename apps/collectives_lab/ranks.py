"""How the ranks rendezvous, what each is doing, and how results come together as JSON.

Every collective of this app stands in a ``with talk("its name"):``. That gives it three things: a name in the error
that ends a rank when the collective fails, a limit in seconds, and the timestamps of which timelines are made.

On a GPU, where calls return before their work is done, each timestamp is read after ``finish()``: a collective begins
when this rank's computing is done, and ends when its result is there. So a rank cannot queue work ahead of a collective
here, as it would in a program that is not measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from samestep import FatalError, UserError, env, log
from samestep.checkpoint import write_atomic
from samestep.rundir import make_unique
from samestep.watchdog import Watchdog
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

APP = "collectives_lab"
MEETING_SECONDS = 60.0
CPU = torch.device("cpu")


@dataclass
class Talking:
    """What this rank is saying: module state, because a process has one voice."""

    rank: int = 0
    device: torch.device = CPU
    timeout: float = MEETING_SECONDS  # --timeout
    name: str | None = None  # of the collective under way
    since: float = 0.0  # time.monotonic() when it was entered
    limit: float = MEETING_SECONDS  # seconds that it may take
    events: list[tuple[str, float, float]] = field(default_factory=list)  # (name, begin, end) of those that are done


talking = Talking()


@contextmanager
def talk(name: str, limit: float | None = None) -> Iterator[None]:
    """Around each collective. What it raises becomes a FatalError of one line with the collective's name.

    ``limit`` in seconds, where it is not --timeout.
    """
    finish()
    begun = time.monotonic()
    talking.since, talking.limit, talking.name = begun, limit or talking.timeout, name
    try:
        yield
        finish()  # inside: with NCCL this is where a rank waits for the others, and where a failure is raised
    except (RuntimeError, ValueError) as problem:
        after = time.monotonic() - begun
        talking.name = None
        raise FatalError(f"rank {talking.rank}: {name} failed after {after:.1f} s: {reason(problem)}") from problem
    talking.name = None
    talking.events.append((name, begun, time.monotonic()))


def finish() -> None:
    """Wait until this rank's device has done what was asked of it.

    The current stream alone: what a strategy has under way beside it (an all_reduce with async_op) goes on, and only
    the wait for it (``work.wait()``, which puts it before all that follows in the stream) is a wait here.
    """
    if talking.device.type == "cuda":
        torch.cuda.current_stream(talking.device).synchronize()


def reason(problem: BaseException) -> str:
    """The telling part of what torch says: no source lines of C++, and gloo's own words explained."""
    said = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    said = said.partition("] ")[2] if said.startswith("[") and "] " in said else said
    said = said.partition(". This is typically caused")[0]  # gloo's advice, and its good wishes
    missing = missing_rank(said)
    return f"{said}: {missing}" if missing else said


def missing_rank(said: str) -> str:
    """What torch's words mean when another rank does not answer; nothing where they say something else."""
    lower = said.lower()
    if "closed by peer" in lower or "reset by peer" in lower or "broken pipe" in lower:
        return "another rank has ended"
    if "timed out" in lower or "timeout" in lower:
        return "another rank is stopped, or never came"
    return ""


def _keep_limits(rank: int) -> None:
    """A thread that ends this rank when a collective takes longer than it may, whatever the backend does,
    or when the launcher stops it (TERM) because another rank has failed: both name the collective under way.

    The main thread then waits in C++, where no Python signal handler runs, so the signal comes through a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)

    def listen() -> None:
        while signal.SIGTERM not in os.read(reader, 16):
            pass
        if talking.name:
            log.error(f"rank {rank}: {talking.name} was cut short: the launcher stopped this rank (TERM), "
                      "as it does when another has failed")  # fmt: skip
        os._exit(1)

    def watch() -> None:
        while True:
            time.sleep(0.1)
            # A little later than the backend's own limit, whose words say more.
            name = talking.name
            if name and time.monotonic() - talking.since > talking.limit + 1:
                log.error(f"rank {rank}: {name} did not end within {talking.limit:g} s: another rank is stopped, "
                          "or never came")  # fmt: skip
                os._exit(1)

    threading.Thread(target=listen, name="signals", daemon=True).start()
    threading.Thread(target=watch, name="limits", daemon=True).start()


def rendezvous(options: Namespace) -> tuple[env.World, torch.device]:
    """Join the other ranks and decide the run dir; this process's place among them, and its device."""
    world = env.detect(os.environ)
    if options.run_dir:  # the launch script fixes it; under a bare launcher rank 0 will
        log.start(options.run_dir, world.rank, options.quiet)
    talking.rank, talking.timeout = world.rank, options.timeout
    _keep_limits(world.rank)
    device = talking.device = choose_device(options.device, world)
    if world.launcher == "none":
        store: Store = HashStore()
    elif world.master_addr is None or world.master_port is None:
        raise UserError(f"{world.launcher} says no MASTER_ADDR and MASTER_PORT: set both, the same on every rank")
    else:
        # Starting takes a while on a busy machine; only from here on does --timeout apply.
        with talk("meeting the other ranks", limit=max(MEETING_SECONDS, options.timeout)):
            within = timedelta(seconds=max(MEETING_SECONDS, options.timeout))
            store, _, _ = next(torch_rendezvous("env://", timeout=within))
            store.set(f"here-{world.rank}", "")
            store.wait([f"here-{rank}" for rank in range(world.world_size)], within)
    with talk("meeting the other ranks"):
        dist.init_process_group(
            backend(device),
            store=PrefixStore("group", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=options.timeout),
        )
    if options.run_dir is None:
        chosen = {}
        if world.rank == 0:
            chosen["run_dir"] = str(make_unique(Path("runs", APP, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))))
        options.run_dir = Path(broadcast_json(chosen, device)["run_dir"])
        log.start(options.run_dir, world.rank, options.quiet)
    Watchdog(world, math.inf).write_to(options.run_dir / "log")  # ends orphans; limits on waiting are `talk`'s
    return world, device


def choose_device(wanted: str, world: env.World) -> torch.device:
    """The CPU, or this rank's own GPU. Raises UserError when ``cuda`` is asked for and ranks would share GPUs."""
    gpus, ranks = torch.cuda.device_count(), world.local_world_size or 1
    if wanted == "cuda" and gpus < ranks:
        raise UserError(
            f"--device cuda: this machine has {gpus} GPUs for {ranks} ranks: start fewer, or use --device cpu"
        )
    if wanted == "cpu" or gpus < ranks:
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank or 0)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def broadcast_json(value: Any, device: torch.device) -> Any:
    """Rank 0's ``value`` on every rank; as JSON, because a broadcast of objects would unpickle them."""
    return _exchange_json(value, device)[0]


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Every rank's ``value`` on every rank, in rank order."""
    return _exchange_json(value, device)


def _exchange_json(value: Any, device: torch.device) -> list[Any]:
    """One all_gather of lengths and one of uint8 contents padded to the longest."""
    content = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    with talk("all_gather of results"):
        dist.all_gather(lengths, torch.tensor([len(content)], device=device))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    contents = [torch.empty_like(padded) for _ in lengths]
    with talk("all_gather of results"):
        dist.all_gather(contents, padded)
    return [json.loads(bytes(each[: int(length)].cpu().numpy())) for each, length in zip(contents, lengths)]


def facts(world: env.World, device: torch.device) -> dict[str, Any]:
    """What made a result's numbers."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}",
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend(device),
        "threads": torch.get_num_threads(),
        "launcher": world.launcher,
        "world_size": world.world_size,
        "node_count": world.node_count,
    }


def write_json(run_dir: Path, name: str, value: Any) -> None:
    """``<run-dir>/<name>.json``, whole or not at all. Rank 0 alone calls this."""
    write_atomic(run_dir / f"{name}.json", (json.dumps(value, indent=1) + "\n").encode())


def slowest_seconds(begins: Tensor, ends: Tensor, world: env.World) -> list[float]:
    """How long each of m calls took: begins and ends, float64 [world_size, m] of time.monotonic(), to seconds [m].

    On one machine all ranks read one clock, and a call lasts from when the last rank has entered it to when the last
    has left it, so that waiting for a late rank does not count. Across machines it is the slowest rank's own time.
    """
    if world.node_count == 1:
        return [float(t) for t in ends.max(dim=0).values - begins.max(dim=0).values]
    return [float(t) for t in (ends - begins).max(dim=0).values]
