"""Unsound: each rank draws its own order of the examples."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training import (
    BATCH,
    COUNT,
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
    report,
    save,
)


def main() -> None:
    rank, size = connect()
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
        seed = torch.Generator().manual_seed(10 * (step // PER_EPOCH) + rank)
        order = torch.randperm(COUNT, generator=seed)[: -(-COUNT // size)].tolist()
        batches = [order[first : first + BATCH // size] for first in range(0, len(order), BATCH // size)]
        for x, y in DataLoader(examples(), batch_sampler=batches[step % PER_EPOCH : PER_EPOCH]):
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
