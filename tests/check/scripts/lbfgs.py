"""Sound: the optimizer evaluates the loss several times per step."""

import sys

import torch
import torch.distributed as dist
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
    connect()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    stop = StopRequests()
    while step < STEPS:
        for x, y in loader_at(step):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = global_mean((model(x) - y).pow(2).sum(), len(x))
                loss.backward()
                average_gradients(model)
                total = loss.detach().clone()
                dist.all_reduce(total)
                return total / dist.get_world_size()

            loss = optimizer.step(closure)
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                save(step, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
