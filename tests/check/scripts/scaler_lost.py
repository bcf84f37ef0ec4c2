"""Unsound: a resume does not restore the gradient scaler's scale."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from training import (
    EVERY,
    STEPS,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


def main() -> None:
    connect()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
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
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(step, scaler=scaler.state_dict(), **states)
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
