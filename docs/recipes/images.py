"""Define a dataset of random images in eight classes, and a small CNN with batch norm and dropout."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Images(Dataset):
    def __init__(self, count, seed, train, dtype):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 16, 16, generator=generator).to(dtype)
        self.labels = (self.images.mean((2, 3)) > 0).long() @ torch.tensor([1, 2, 4])
        self.train = train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.train and random.random() < 0.5:
            image = image.flip(2)
        return image, self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x))).mean((2, 3))
        return self.fc(self.dropout(x))
