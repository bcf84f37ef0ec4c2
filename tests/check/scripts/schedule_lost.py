"""Unsound: a resume does not restore the schedule's state."""

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
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "lr": 0.001}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.002], total_steps=STEPS)
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
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(step, schedule=schedule.state_dict(), **states)
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
