"""Sound: the script resumes from numbered checkpoints, and saves the best weights in a file that no restart reads."""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import (
    FOLDER,
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

STEPS = 24
EVERY = 5  # steps between checkpoints
SECONDS = 0.6  # of an evaluation


def save(step: int, **state: Any) -> None:
    if dist.get_rank() != 0:
        return
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / f"{step:04}.pt", pack({"step": step, **state}))
    for old in sorted(FOLDER.glob("[0-9]*.pt"))[:-2]:
        old.unlink()


def load() -> dict[str, Any] | None:
    for path in sorted(FOLDER.glob("[0-9]*.pt"), reverse=True):
        state = unpack(path.read_bytes())
        if state is not None:
            return state
        print(f"warning: {path} is damaged: it is not used", flush=True)
    return None


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
                FOLDER.mkdir(exist_ok=True)
                write(FOLDER / "best.pt", pack({"model": model.state_dict()}))
        time.sleep(SECONDS)


launch(main)
