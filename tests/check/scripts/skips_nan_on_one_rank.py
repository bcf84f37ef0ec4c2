"""Unsound: only the rank that finds NaN in its shard skips the step."""

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
    examples,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


def main() -> None:
    connect()
    data = examples()
    data.tensors[0][16] = torch.nan  # of two ranks, rank 1 always gets this example
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    stop = StopRequests()
    while step < STEPS:
        for x, y in loader_at(step, data):
            optimizer.zero_grad()
            loss = global_mean((model(x) - y).pow(2).sum(), len(x))
            loss.backward()
            finite = bool(torch.isfinite(loss))
            if not finite:
                optimizer.zero_grad(set_to_none=False)
            average_gradients(model)
            if finite:
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
