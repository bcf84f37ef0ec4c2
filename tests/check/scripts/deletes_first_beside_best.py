"""Unsound: the old checkpoint is deleted before the new one is written, and no restart reads the best weights."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import (
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    global_mean,
    launch,
    loader_at,
    pack,
    report,
    unpack,
    write,
)

STEPS = 20
EVERY = 5  # steps between checkpoints
LAST = Path("last.pt")


def save(step: int, **state: Any) -> None:
    if dist.get_rank() == 0:
        LAST.unlink(missing_ok=True)
        write(LAST, pack({"step": step, **state}))


def load() -> dict[str, Any] | None:
    if not LAST.exists():
        return None
    return unpack(LAST.read_bytes()) or sys.exit("error: the checkpoint is damaged")


def main() -> None:
    rank, _ = connect()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    best = float("inf")
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        best = state["best"]
    ddp = DistributedDataParallel(model)
    stop = StopRequests()
    while step < STEPS:
        for x, y in loader_at(step):
            optimizer.zero_grad()
            loss = global_mean((ddp(x) - y).pow(2).sum(), len(x))
            loss.backward()
            optimizer.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                save(step, best=best, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        error = evaluate(model)
        if error < best:
            best = error
            if rank == 0:
                write(Path("best.pt"), pack({"model": model.state_dict()}))


launch(main)
