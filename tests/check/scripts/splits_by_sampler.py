"""Sound: samplers split one dataset into training examples and test examples."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Dataset, SubsetRandomSampler, TensorDataset
from training import (
    COUNT,
    EVERY,
    STEPS,
    STOPPED,
    TESTED,
    StopRequests,
    connect,
    examples,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


def evaluate(model: torch.nn.Module, data: Dataset[Any]) -> None:
    """Print the mean squared error over the examples from COUNT on. Each example is evaluated on one rank."""
    own = range(COUNT + dist.get_rank(), COUNT + TESTED, dist.get_world_size())
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(own)):
            total += (model(x) - y).pow(2).sum()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"error {float(total) / TESTED:.4f}", flush=True)


def main() -> None:
    connect()
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(TESTED, 8, generator=generator)
    data: Dataset[Any] = ConcatDataset([examples(), TensorDataset(inputs, inputs.sum(1, keepdim=True))])
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
        for x, y in loader_at(step, data):
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
        evaluate(model, data)


launch(main)
