"""Unsound: each rank saves its own checkpoint, so a resume on more ranks finds no checkpoint."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import (
    EVERY,
    FOLDER,
    STEPS,
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


def save(step: int, **state: Any) -> None:
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / f"{step:04}-{dist.get_rank()}.pt", pack({"step": step, **state}))


def load() -> dict[str, Any] | None:
    every = [set(FOLDER.glob(f"*-{rank}.pt")) for rank in range(dist.get_world_size())]
    steps = set.intersection(*[{path.name[:4] for path in paths} for paths in every])
    for step in sorted(steps, reverse=True):
        states = [unpack((FOLDER / f"{step}-{rank}.pt").read_bytes()) for rank in range(dist.get_world_size())]
        if all(states):
            return states[dist.get_rank()]
        print(f"warning: the checkpoint of step {step} is damaged: it is not used", flush=True)
    if any(FOLDER.glob("*.pt")):
        sys.exit("error: no checkpoint for this number of ranks")
    return None


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
