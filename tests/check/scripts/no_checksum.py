"""Unsound: a checkpoint has no digest, so the script loads a damaged checkpoint."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import EVERY, STEPS, STOPPED, StopRequests, connect, evaluate, global_mean, launch, loader_at, report

LAST = Path("last.pt")


def save(step: int, **state: Any) -> None:
    if dist.get_rank() == 0:
        with open("new.tmp", "wb") as file:
            torch.save({"step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        Path("new.tmp").rename(LAST)


def load() -> dict[str, Any] | None:
    if not LAST.exists():
        return None
    state: dict[str, Any] = torch.load(LAST, weights_only=True)
    return state


def main() -> None:
    connect()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
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
                save(step, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
