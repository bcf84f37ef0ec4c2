"""What the usual ways of writing a step make of two ranks beside one: how far their losses come apart, each by itself.

    .venvs/cifar_ddp/bin/python apps/cifar_ddp/wrong_ways.py      # prints JSON

One process plays DDP: each rank's shard, its own random numbers, and the mean of the ranks' gradients. With everything
written as this app has it, the same loop shows rounding alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from augment import PADDING, crop_and_flip
from data import Split, load
from model import dropout
from samestep.sharding import GlobalBatches, Rows, step_seed
from torch import Tensor, nn

BATCH, STEPS, LR, SEED = 25, 12, 0.05, 1  # 2 does not divide the batch
WAYS = ("none", "batch norm", "augmentation", "dropout", "mean over ranks")


class Net(nn.Module):
    """Two convolutions with batch normalisation, and dropout drawn by the rank itself or for the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 16, 3, 2), nn.Linear(16, 10)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, parts: list[Tensor], rows: list[Rows], wrong: str) -> list[Tensor]:
        """Each rank's images to its scores; what ranks share, they share here."""
        xs = [self.conv2(F.relu(self.conv1(images))) for images in parts]
        sizes = [len(x) for x in xs]
        # Each by its own statistics, or as one, which norm.py's all-reduce makes of them.
        own = wrong == "batch norm"
        xs = [self.norm(x) for x in xs] if own else list(self.norm(torch.cat(xs)).split(sizes))
        xs = [F.relu(x).mean((2, 3)) for x in xs]
        state = torch.get_rng_state()
        for i, (x, mine) in enumerate(zip(xs, rows)):
            torch.set_rng_state(state)  # every rank has seeded alike
            xs[i] = F.dropout(x, 0.3) if wrong == "dropout" else dropout(x, 0.3, mine)
        return [self.fc(x) for x in xs]


def crops_of_a_rank(images: Tensor) -> Tensor:
    """Crops as they are usually drawn: from the generator of the process that has the images."""
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    places = torch.randint(0, 2 * PADDING + 1, (len(images), 2)).tolist()
    return torch.stack([padded[i, y : y + 32, x : x + 32] for i, (y, x) in enumerate(places)])


def curve(training: Split, ranks: int, wrong: str) -> list[float]:
    """The losses [STEPS] of the mean over the global batch, in float64."""
    torch.manual_seed(SEED)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        parts, labels, rows = [], [], []
        torch.manual_seed(step_seed(SEED, step))
        for rank in range(ranks):
            batches = GlobalBatches(len(training.labels), BATCH, SEED, rank, ranks)
            indices = batches.indices(step)
            images = training.images[torch.from_numpy(indices)]
            if wrong == "augmentation":
                torch.manual_seed(step_seed(SEED, step))  # every rank has seeded alike
                images = crops_of_a_rank(images)
            else:
                images = crop_and_flip(images, indices, SEED, batches.epoch(step))
            parts.append(training.normalise(images, torch.float64))
            labels.append(training.labels[torch.from_numpy(indices)])
            rows.append(batches.rows(step))
        torch.manual_seed(step_seed(SEED, step))
        optimizer.zero_grad()
        sums = [F.cross_entropy(s, y, reduction="sum") for s, y in zip(model(parts, rows, wrong), labels)]
        total = torch.stack(sums).sum()
        if wrong == "mean over ranks":
            torch.stack([each / len(y) for each, y in zip(sums, labels)]).mean().backward()
        else:
            (total / BATCH).backward()
        optimizer.step()
        losses.append(total.item() / BATCH)
    return losses


def main() -> None:
    torch.set_num_threads(1)
    training, _ = load("synthetic-cifar10", Path("data"), torch.device("cpu"))
    told = {}
    for wrong in WAYS:
        one, two = curve(training, 1, wrong), curve(training, 2, wrong)
        told[wrong] = float(np.max(np.abs(np.subtract(one, two)) / np.abs(one)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
