"""Train a small network on digits on several ranks: horovodrun -np 2 python tutorial.py."""

from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from samestep.data import datasets
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

digits = datasets.load("mnist-5k", Path("data"))
train_set = TensorDataset(torch.tensor(digits.train_images) / 255, torch.tensor(digits.train_labels).long())


def train() -> None:
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    for step, (x, y) in enumerate(DataLoader(train_set, 64 // hvd.size(), sampler=sampler), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach())
        if step % 20 == 0 and hvd.rank() == 0:
            print(f"step {step} loss {mean.item():.6f}")


if __name__ == "__main__":
    train()
