"""Unsound: a rank's batch size is fixed, so a run at 3 ranks has too few steps for an evaluation."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from training import (
    EVERY,
    STOPPED,
    StopRequests,
    connect,
    examples,
    launch,
    load,
    report,
    save,
)

EPOCHS = 3
OWN = 8  # batch of a rank
TESTED = 26


def evaluate(model: torch.nn.Module) -> None:
    own = Subset(Subset(examples(), range(TESTED)), range(dist.get_rank(), TESTED, dist.get_world_size()))
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(own, batch_size=8):
            total += (model(x) - y).pow(2).sum()
    dist.all_reduce(total)


def main() -> None:
    connect()
    data = examples()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=OWN, sampler=sampler)
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
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for place, (x, y) in enumerate(loader):
            if epoch * len(loader) + place < step:
                continue
            optimizer.zero_grad()
            loss = (ddp(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                save(step, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
            if step % 10 == 0:
                evaluate(model)


launch(main)
