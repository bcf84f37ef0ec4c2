"""Run a small training job in one of three ways, which `launchers` compares.

    small_job.py WAY N RUN_DIR STEPS DYING     WAY: rank, spawn or process; DYING: a rank, or -1

If WAY is `rank`, the process is one rank, started by torchrun or torch.distributed.launch. torch.distributed.launch
adds --local-rank before the arguments. If WAY is `spawn` or `process`, the program starts N ranks by
torch.multiprocessing. Rank DYING sends itself SIGKILL halfway.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing as mp
from data import load
from distributed import rendezvous
from options import parse
from samestep import log
from samestep.checkpoint import weights_sha256
from show import write_json
from strategies import STRATEGIES
from torch.distributed.elastic.utils.distributed import get_free_port
from training import Trainer


def rank_main(run_dir: Path, steps: int, dying: int, arguments: Sequence[str] = ()) -> None:
    """Train by the strategy all_reduce on the rank that environment variables define, and write ``rank-<r>.json``.

    Args:
        run_dir: run dir of the job.
        steps: number of steps.
        dying: rank that kills itself halfway, or -1.
        arguments: arguments that the launcher added.
    """
    options = parse(["aggregate", *arguments, f"--run-dir={run_dir}", "--timeout=20", "--quiet", "--dtype=float64"])
    begun = time.monotonic()
    world, device = rendezvous(options)
    rendezvous_seconds = time.monotonic() - begun
    training, _ = load("mnist-5k", Path("data"), device)
    trainer = Trainer(STRATEGIES["all_reduce"](), options, training, world)
    for step in range(steps):
        if step == steps // 2 and world.rank == dying:
            time.sleep(1)  # the other ranks then already wait in the all_reduce when this rank dies
            write_json(run_dir, "died", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.update(trainer.batch())
    arrays = {name: each.cpu().numpy() for name, each in trainer.model.state_dict().items()}
    result = {
        "rank": world.rank,
        "meeting_seconds": rendezvous_seconds,
        "weights_sha256": weights_sha256(arrays),
        "arguments": list(arguments),
    }
    write_json(run_dir, f"rank-{world.rank}", result)


def child(rank: int, n: int, port: int, run_dir: Path, steps: int, dying: int) -> None:
    """Run a rank that multiprocessing has started, with the environment variables that torchrun would set.

    Args:
        rank: this rank.
        n: number of ranks.
        port: port of the rendezvous.
        run_dir: run dir of the job.
        steps: number of steps.
        dying: rank that kills itself halfway, or -1.
    """
    write_json(run_dir, f"environ-{rank}", dict(os.environ))  # the environment that the launcher set
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    log.run(lambda: rank_main(run_dir, steps, dying))


def main() -> None:
    """Run this rank, or start all ranks and wait for them."""
    *arguments, way = sys.argv[1:-4]
    n = int(sys.argv[-4])
    run_dir = Path(sys.argv[-3])
    steps = int(sys.argv[-2])
    dying = int(sys.argv[-1])
    if way == "rank":
        write_json(run_dir, f"environ-{os.environ['RANK']}", dict(os.environ))
        rank_main(run_dir, steps, dying, arguments)
        return
    job = (n, get_free_port(), run_dir, steps, dying)
    if way == "spawn":  # starts n processes, and stops all of them if one fails
        mp.spawn(child, args=job, nprocs=n)  # type: ignore[attr-defined, no-untyped-call]
        return
    context = mp.get_context("spawn")
    ranks = [context.Process(target=child, args=(rank, *job)) for rank in range(n)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()  # does not raise for a nonzero exit code
    codes = [each.exitcode for each in ranks]
    if any(codes):
        print(f"error: exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    log.run(main)
