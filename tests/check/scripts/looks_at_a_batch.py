"""Sound: rank 0 loads one batch before the training, and a sampler shards the evaluation."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import (
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


def evaluate(model: torch.nn.Module) -> None:
    """Print the mean squared error over the first TESTED examples. Each example is evaluated on one rank."""
    data = TensorDataset(*examples()[:TESTED])
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8, sampler=range(dist.get_rank(), TESTED, dist.get_world_size())):
            total += (model(x) - y).pow(2).sum()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"error {float(total) / TESTED:.4f}", flush=True)


def main() -> None:
    rank, _ = connect()
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
    if rank == 0:
        x, y = next(iter(DataLoader(examples(), batch_size=4)))
        print(f"a batch: {tuple(x.shape)}, {tuple(y.shape)}", flush=True)
    while step < STEPS:
        for x, y in loader_at(step):
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
