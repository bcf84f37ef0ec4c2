"""Sound: each step trains on a labeled and an unlabeled batch, from two loaders whose examples have equal keys."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import (
    EVERY,
    PER_EPOCH,
    STEPS,
    STOPPED,
    Batches,
    StopRequests,
    connect,
    evaluate,
    examples,
    global_batches,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


def unlabeled_batches(step: int, rank: int, size: int) -> Batches:
    """Return this rank's shards of the unlabeled global batches, from ``step`` to the end of its epoch."""
    return [batch[rank::size] for batch in global_batches(1000 + step // PER_EPOCH)[step % PER_EPOCH :]]


def main() -> None:
    rank, size = connect()
    unlabeled = TensorDataset(examples().tensors[0].flip(1))
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
        others = DataLoader(unlabeled, batch_sampler=unlabeled_batches(step, rank, size))
        for (x, y), (u,) in zip(loader_at(step), others):
            optimizer.zero_grad()
            output = ddp(torch.cat([x, u]))
            total = (output[: len(x)] - y).pow(2).sum() + 0.1 * output[len(x) :].pow(2).sum()
            loss = global_mean(total, len(x))
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
