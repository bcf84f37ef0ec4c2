"""One small job and three ways to start it; `launchers` compares them.

    small_job.py WAY N RUN_DIR STEPS DYING     WAY: rank, spawn or process; DYING: a rank, or -1

`rank` is one rank of a job that somebody else has started (torchrun). The others start N ranks themselves, as a user
of torch.multiprocessing would. Rank DYING ends itself with SIGKILL halfway.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from aggregate import train_step
from data import load
from model import build_model
from options import parse
from ranks import rendezvous
from samestep import log
from samestep.checkpoint import weights_sha256, write_atomic
from samestep.sharding import GlobalBatches, step_seed
from strategies import STRATEGIES

BATCH, SEED = 128, 1


def rank_main(run_dir: Path, steps: int, dying: int) -> None:
    """Train by all_reduce on this rank, whose place is in the environment; what it found goes to ``rank-<r>.json``."""
    options = parse(["launchers", f"--run-dir={run_dir}", "--timeout=20", "--quiet"])
    begun = time.monotonic()
    world, device = rendezvous(options)
    met = time.monotonic() - begun
    training, _ = load("mnist-5k", Path("data"), device)
    model = build_model(0.5, torch.float64, SEED).to(device)
    strategy = STRATEGIES["all_reduce"]()
    module = strategy.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    batches = GlobalBatches(len(training.labels), BATCH, SEED, world.rank, world.world_size)
    for step in range(steps):
        if step == steps // 2 and world.rank == dying:
            time.sleep(1)  # by then the others wait in the step's all_reduce, where a death is hardest to see
            write_atomic(run_dir / "died.json", json.dumps(time.monotonic()).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step_seed(SEED, step))
        images, labels = training.batch(batches.indices(step), torch.float64)
        train_step(strategy, module, optimizer, images, labels, batches.rows(step))
    weights = {name: each.detach().cpu().numpy() for name, each in model.state_dict().items()}
    found = {"rank": world.rank, "meeting_seconds": met, "weights_sha256": weights_sha256(weights)}
    write_atomic(run_dir / f"rank-{world.rank}.json", json.dumps(found).encode())


def note_environment(rank: int | str, run_dir: Path) -> None:
    """What the launcher has put into the environment, before this program adds its own."""
    write_atomic(run_dir / f"environ-{rank}.json", json.dumps(dict(os.environ)).encode())


def child(rank: int, n: int, port: int, run_dir: Path, steps: int, dying: int) -> None:
    """A rank that multiprocessing has started: it knows its rank from an argument, and says so as torchrun would."""
    note_environment(rank, run_dir)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    log.run(lambda: rank_main(run_dir, steps, dying))


def main() -> None:
    way, n, run_dir, steps, dying = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    if way == "rank":
        note_environment(os.environ["RANK"], run_dir)
        return rank_main(run_dir, steps, dying)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    if way == "spawn":  # starts n processes, watches all, and stops the others when one fails
        mp.spawn(child, args=(n, port, run_dir, steps, dying), nprocs=n)  # type: ignore[attr-defined, no-untyped-call]
        return None
    context = mp.get_context("spawn")
    ranks = [context.Process(target=child, args=(rank, n, port, run_dir, steps, dying)) for rank in range(n)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()  # returns whatever the exit code was: to look is the caller's
    codes = [each.exitcode for each in ranks]
    if any(codes):
        print(f"error: exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
        os._exit(1)
    return None


if __name__ == "__main__":
    log.run(main)
