"""Sound: the script resumes from numbered checkpoints, and saves the best weights in a file that no restart reads."""

import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel
from training import (
    FOLDER,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    global_mean,
    launch,
    load,
    loader_at,
    pack,
    report,
    save,
    write,
)

STEPS = 24
EVERY = 5  # steps between checkpoints
SECONDS = 0.6  # of an evaluation


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
