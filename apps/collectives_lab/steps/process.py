"""Train a small network on digits on several ranks: python process.py."""

import gc
import multiprocessing
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep.data import datasets
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

digits = datasets.load("mnist-5k", Path("data"))
train_set = TensorDataset(torch.tensor(digits.train_images) / 255, torch.tensor(digits.train_labels).long())


def train(rank: int, size: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(train_set)
    for step, (x, y) in enumerate(DataLoader(train_set, 64 // size, sampler=sampler), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if step % 20 == 0 and rank == 0:
            print(f"step {step} loss {mean.item() / size:.6f}")
    del model
    gc.collect()  # frees DDP: a thread of gloo may otherwise abort the exit
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    port = free_port()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train, args=(rank, 2, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()  # if one rank fails, the other rank waits in a collective until gloo's timeout
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
