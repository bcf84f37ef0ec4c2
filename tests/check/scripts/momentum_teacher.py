"""Sound: a resume restores the teacher, whose weights are a moving average of the model's weights."""

import copy
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
    teacher = copy.deepcopy(model).requires_grad_(False)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        teacher.load_state_dict(state["teacher"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    stop = StopRequests()
    while step < STEPS:
        for x, y in loader_at(step):
            optimizer.zero_grad()
            output = ddp(x)
            loss = global_mean((output - y).pow(2).sum() + (output - teacher(x)).pow(2).sum(), len(x))
            loss.backward()
            optimizer.step()
            for slow, fast in zip(teacher.parameters(), model.parameters()):
                slow.lerp_(fast.detach(), 0.1)
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(step, teacher=teacher.state_dict(), **states)
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
