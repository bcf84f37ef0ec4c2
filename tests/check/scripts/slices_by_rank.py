"""Sound: each rank copies its examples of an epoch into its own dataset, and loads batches of this dataset."""

import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import (
    EVERY,
    PER_EPOCH,
    STEPS,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    examples,
    global_mean,
    launch,
    load,
    own_batches,
    report,
    save,
)


def own_loader(step: int) -> DataLoader[Any]:
    """Return a loader of this rank's examples of an epoch, from ``step`` to the epoch's end."""
    inputs, targets = examples().tensors
    places = []
    own: list[int] = []
    for batch in own_batches(step - step % PER_EPOCH):
        places.append([*range(len(own), len(own) + len(batch))])
        own += batch
    return DataLoader(TensorDataset(inputs[own], targets[own]), batch_sampler=places[step % PER_EPOCH :])


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
        for x, y in own_loader(step):
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
