"""Take steps of a model whose gradients fill two of DDP's buckets, with rank 1 slow in the input of each step.

torchrun starts the program on 2 ranks. Rank 0 prints the seconds of its phases in the last three steps as JSON.
"""

from __future__ import annotations

import json
import os
import time

import torch
from samestep import env
from samestep.step_timer import PHASES, StepTimer
from samestep.torch import distributed, reduction
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SLOW = 0.3  # seconds


def main() -> None:
    distributed.rendezvous(env.detect(os.environ), torch.device("cpu"), 60)
    rank = int(os.environ["RANK"])
    timer = StepTimer()
    last = nn.Linear(512, 512)
    model = nn.Sequential(nn.Linear(256, 512), last)  # the weights have 1.5 MiB; DDP's first bucket holds 1 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    reduction.register_ordered_hook(ddp, timer)
    reduction.time_phases(model, optimizer, timer)
    for step in range(5):
        if step == 2:
            timer.pop()  # the second forward pass waits until all ranks have rebuilt their buckets
        with timer.phase("input"):
            time.sleep(SLOW * rank)
        optimizer.zero_grad()
        ddp(torch.ones(4, 256)).sum().backward()
        optimizer.step()
    if rank == 0:
        assert last.bias.grad is not None
        print(json.dumps({**dict(zip(PHASES, timer.pop())), "gradient": last.bias.grad.unique().tolist()}), flush=True)
    os._exit(0)  # skip Python's shutdown, which gloo's threads may abort


if __name__ == "__main__":
    main()
