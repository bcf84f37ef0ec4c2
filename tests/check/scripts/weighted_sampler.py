"""Sound: WeightedRandomSampler draws an epoch's examples with replacement, equally on all ranks."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler
from training import (
    BATCH,
    COUNT,
    EVERY,
    PER_EPOCH,
    STEPS,
    STOPPED,
    Batches,
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


def batches_from(step: int, rank: int, size: int) -> Batches:
    """Return this rank's shards of the weighted global batches, from ``step`` to the end of its epoch."""
    rare = (examples().tensors[1] > 1).squeeze(1)
    generator = torch.Generator().manual_seed(step // PER_EPOCH)
    order = list(WeightedRandomSampler((1 + 4 * rare).tolist(), COUNT, replacement=True, generator=generator))
    batches = [order[first : first + BATCH] for first in range(0, COUNT, BATCH)]
    return [batch[rank::size] for batch in batches[step % PER_EPOCH :]]


def main() -> None:
    rank, size = connect()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    stop = StopRequests()
    while step < STEPS:
        for x, y in DataLoader(examples(), batch_sampler=batches_from(step, rank, size)):
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
