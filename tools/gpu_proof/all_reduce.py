"""Reduce two tensors over the ranks, check the sums, and time the reduction. The first rows run this program.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python all_reduce.py cuda

The program uses the apps' functions to choose its device and to join the other ranks.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from samestep import env
from samestep.options import SHARED_GPU
from samestep.torch import distributed

VALUES = 21_840  # number of values in mnist_ddp's gradients
CALLS = 20
TIMEOUT = 30.0  # seconds


def main() -> None:
    world = env.detect()
    device = distributed.choose_device(SHARED_GPU if sys.argv[1] == "cuda" else "cpu", world)
    distributed.rendezvous(world, device, TIMEOUT)
    expected = world.world_size * (world.world_size + 1) / 2
    for dtype in (torch.float64, torch.float32):
        x = torch.full((VALUES,), float(world.rank + 1), dtype=dtype, device=device)
        dist.all_reduce(x)
        if not bool((x == expected).all()):
            sys.exit(f"error: rank {world.rank}: {dtype} sums are {x[:3].tolist()}, not {expected}")
    begun = time.monotonic()
    for _ in range(CALLS):
        dist.all_reduce(x)
    x.sum().item()  # this call waits for the device
    seconds = (time.monotonic() - begun) / CALLS
    recorded = distributed.last_collective()
    if world.rank == 0:
        print(json.dumps({"milliseconds": round(1000 * seconds, 2), "recorded": (recorded or {}).get("name")}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
