"""Steps of a model whose gradients fill two of DDP's buckets; rank 1 is slow in the input of each, and says something.

Started by torchrun at 2 ranks; rank 0 prints the seconds of its phases in the last three, and what was said, as JSON.
"""

from __future__ import annotations

import json
import os
import time

import ranks  # type: ignore[import-not-found]
import torch
from samestep import env
from samestep.phases import PHASES, Phases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SLOW = 0.3  # seconds


def main() -> None:
    ranks.rendezvous(env.detect(os.environ), torch.device("cpu"), 60)
    rank, phases = int(os.environ["RANK"]), Phases()
    last = nn.Linear(512, 512)
    model = nn.Sequential(nn.Linear(256, 512), last)  # 1.5 MiB, of which DDP's first bucket takes 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    along = ranks.order_sums(ddp, phases, torch.empty(0), torch.empty(0))  # no sample, as it is a small model
    ranks.time_phases(model, optimizer, phases)
    for step in range(5):
        if step == 2:
            phases.take()  # the second forward pass waits until all ranks order their buckets
        phases.begin()
        time.sleep(SLOW * rank)
        phases.end("input")
        said = torch.tensor([rank + step / 10, 1 / 3], dtype=torch.float64)
        along[:] = [said]
        optimizer.zero_grad()
        ddp(torch.ones(4, 256)).sum().backward()
        optimizer.step()
    if rank == 0:
        assert last.bias.grad is not None
        told = {"said": said.tolist(), "left": len(along), "gradient": last.bias.grad.unique().tolist()}
        print(json.dumps({**dict(zip(PHASES, phases.take())), **told}), flush=True)
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
