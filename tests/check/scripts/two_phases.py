"""Sound: each phase has its own optimizer, so a restart in the second phase creates only the second optimizer."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from training import (
    PER_EPOCH,
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

FIRST = 3 * PER_EPOCH  # steps that train the head only
STEPS = 4 * PER_EPOCH


def main() -> None:
    connect()
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        step = state["step"]
    stop = StopRequests()
    for phase, end in enumerate((FIRST, STEPS)):
        if step >= end:
            continue
        model[0].requires_grad_(phase == 1)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=(0.01, 0.001)[phase])
        if state and state["phase"] == phase:
            optimizer.load_state_dict(state["optimizer"])
        ddp = DistributedDataParallel(model)
        while step < end:
            for x, y in loader_at(step):
                optimizer.zero_grad()
                loss = global_mean((ddp(x) - y).pow(2).sum(), len(x))
                loss.backward()
                optimizer.step()
                step += 1
                report(step, loss)
                asked = stop.agreed()
                if asked or step % PER_EPOCH == 0:
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    save(step, phase=phase, **states)
                if asked:
                    sys.exit(STOPPED)
            evaluate(model)


launch(main)
