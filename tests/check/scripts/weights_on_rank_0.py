"""Unsound: only rank 0 loads the checkpoint, and the other ranks keep their initial weights."""

import sys

import torch
from training import (
    EVERY,
    STEPS,
    STOPPED,
    StopRequests,
    average_gradients,
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
    rank, _ = connect()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    state = load()
    if state:
        step = state["step"]
        if rank == 0:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    stop = StopRequests()
    while step < STEPS:
        for x, y in loader_at(step):
            optimizer.zero_grad()
            loss = global_mean((model(x) - y).pow(2).sum(), len(x))
            loss.backward()
            average_gradients(model)
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
