"""Sound: all ranks skip a batch if one rank finds NaN in its shard."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import (
    EVERY,
    STEPS,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    examples,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


def main() -> None:
    connect()
    data = examples()
    data.tensors[0][11] = torch.nan
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done = 0  # number of batches, including skipped batches
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    ddp = DistributedDataParallel(model)
    stop = StopRequests()
    while done < STEPS:
        for x, y in loader_at(done, data):
            optimizer.zero_grad()
            loss = global_mean((ddp(x) - y).pow(2).sum(), len(x))
            bad = (~torch.isfinite(loss.detach())).float()
            dist.all_reduce(bad)
            done += 1
            if not bad:
                loss.backward()
                optimizer.step()
            report(done, loss)
            asked = stop.agreed()
            if asked or done % EVERY == 0:
                save(done, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
