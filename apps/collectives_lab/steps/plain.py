"""Train a small network on digits in one process: python plain.py."""

from pathlib import Path

import torch
import torch.nn.functional as F
from samestep.data import datasets
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

digits = datasets.load("mnist-5k", Path("data"))
train_set = TensorDataset(torch.tensor(digits.train_images) / 255, torch.tensor(digits.train_labels).long())


def train() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0)  # the same order of samples as on several ranks
    for step, (x, y) in enumerate(DataLoader(train_set, 64, sampler=sampler), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    train()
