"""What the usual ways of writing a step break, each by itself and in figures.

    .venvs/cifar_ddp/bin/python apps/cifar_ddp/wrong_ways.py      # prints JSON

A training of twelve steps in float64, once undivided, and once at two ranks, in three micro-batches, or killed after
six steps and resumed: how far do the losses come apart? One process plays DDP: each rank's shard, its own random
numbers, and the mean of the ranks' gradients. With everything written as this app has it, rounding is all that differs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from augment import PADDING, crop_and_flip
from data import Split, load
from model import channel_dropout
from samestep import schedules
from samestep.sharding import BatchSlice, GlobalBatches, shard, step_seed
from torch import Tensor, nn

BATCH, STEPS, LR, SEED, CLIP, DECAY = 25, 12, 0.2, 1, 0.5, 0.9  # neither 2 nor 3 divides the batch
# What is divided, and what is usually written for it.
WAYS = {
    "ranks": ("none", "mean over ranks", "augmentation", "dropout", "batch norm", "clipping"),
    "micro-batches": ("none", "mean over micro-batches", "dropout"),
    "resumed": ("none", "scheduler", "average"),
}


class Net(nn.Module):
    """Two convolutions with a normalisation, and dropout drawn by the rank itself or for the global batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 16, 3, 2), nn.Linear(16, 10)
        self.norm = norm

    def forward(self, parts: Sequence[Tensor], rows: Sequence[BatchSlice], wrong: str) -> list[Tensor]:
        """Each part's images to its scores; what parts share, they share here."""
        xs = [self.conv2(F.relu(self.conv1(images))) for images in parts]
        # Each by its own statistics, or as one, which norm.py's all-reduce makes of them.
        xs = (
            [self.norm(x) for x in xs]
            if wrong == "batch norm"
            else list(self.norm(torch.cat(xs)).split([*map(len, xs)]))
        )
        xs = [F.relu(x).mean((2, 3)) for x in xs]
        state = torch.get_rng_state()
        for i, (x, local) in enumerate(zip(xs, rows)):
            torch.set_rng_state(state)  # all have seeded alike
            xs[i] = F.dropout(x, 0.3) if wrong == "dropout" else channel_dropout(x, 0.3, local)
        return [self.fc(x) for x in xs]


def crops_of_a_rank(images: Tensor) -> Tensor:
    """Crops as they are usually drawn: from the generator of the process that has the images."""
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    places = torch.randint(0, 2 * PADDING + 1, (len(images), 2)).tolist()
    return torch.stack([padded[i, y : y + 32, x : x + 32] for i, (y, x) in enumerate(places)])


def gradients_of(model: nn.Module, sums: Sequence[Tensor], sizes: Sequence[int], wrong: str) -> list[Tensor]:
    """Of the mean over the global batch's samples, clipped to a norm of CLIP; ``sums`` are the parts' summed losses."""
    parameters = list(model.parameters())
    if wrong.startswith("mean over"):
        loss = torch.stack([each / size for each, size in zip(sums, sizes)]).mean()
    else:
        loss = torch.stack(list(sums)).sum() / sum(sizes)
    if wrong != "clipping":
        return clipped(torch.autograd.grad(loss, parameters))
    parts = [each * len(sums) / sum(sizes) for each in sums]  # what a rank has before DDP averages
    of_ranks = [clipped(torch.autograd.grad(part, parameters, retain_graph=True)) for part in parts]
    return [torch.stack(each).mean(0) for each in zip(*of_ranks)]


def clipped(gradients: Sequence[Tensor]) -> list[Tensor]:
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    return [gradient * (CLIP / norm).clamp(max=1) for gradient in gradients]


def curve(training: Split, divided: str, parts: int, wrong: str) -> list[float]:
    """The losses [STEPS] of the mean over the global batch, and that of the average of the weights at the end."""
    torch.manual_seed(SEED)
    norm: nn.Module = nn.GroupNorm(4, 16) if divided == "micro-batches" else nn.BatchNorm2d(16)
    model = Net(norm).double()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        if divided == "resumed" and parts > 1 and step == STEPS // 2:  # weights and optimizer state were saved
            for group in optimizer.param_groups:
                group["lr"] = LR  # as the program has it when it starts
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            average = copy.deepcopy(model) if wrong == "average" else average
        if wrong != "scheduler":
            optimizer.param_groups[0]["lr"] = LR * schedules.cosine(step, STEPS)
        count = 1 if divided == "resumed" else parts
        images, labels, rows = batch_of(training, step, count, wrong)
        torch.manual_seed(step_seed(SEED, step))
        sums = [F.cross_entropy(s, y, reduction="sum") for s, y in zip(model(images, rows, wrong), labels)]
        for parameter, gradient in zip(model.parameters(), gradients_of(model, sums, [*map(len, labels)], wrong)):
            parameter.grad = gradient
        optimizer.step()
        if wrong == "scheduler":
            scheduler.step()
        for local, theirs in zip(average.parameters(), model.parameters()):
            local.data.lerp_(theirs.data, 1 - DECAY)
        losses.append(torch.stack(sums).sum().item() / BATCH)
    images, labels, rows = batch_of(training, STEPS, 1, "none")
    torch.manual_seed(SEED)
    return [*losses, F.cross_entropy(average(images, rows, "none")[0], labels[0]).item()]


def batch_of(training: Split, step: int, count: int, wrong: str) -> tuple[list[Tensor], list[Tensor], list[BatchSlice]]:
    """A global batch in ``count`` parts: images [m, 3, 32, 32], labels [m], and which rows they are."""
    batches = GlobalBatches(len(training.labels), BATCH, SEED)
    images, labels, rows = [], [], []
    for k in range(count):
        first, last = shard(batches.size(step), k, count)
        indices = batches.indices(step)[first:last]
        chosen = training.images[torch.from_numpy(indices)]
        if wrong == "augmentation":
            torch.manual_seed(step_seed(SEED, step))  # every rank has seeded alike
            chosen = crops_of_a_rank(chosen)
        else:
            chosen = crop_and_flip(chosen, indices, SEED, batches.epoch(step))
        images.append(training.normalise(chosen, torch.float64))
        labels.append(training.labels[torch.from_numpy(indices)])
        rows.append(BatchSlice(first, batches.size(step)))
    return images, labels, rows


def lost_updates(training: Split) -> float:
    """The share of weights that a step leaves as they were where they are bfloat16; in float32 it is next to none."""
    torch.manual_seed(SEED)
    model = Net(nn.BatchNorm2d(16))
    images, labels, rows = batch_of(training, 0, 1, "none")
    loss = F.cross_entropy(model([images[0].float()], rows, "none")[0], labels[0])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    kept = [
        (weight.bfloat16() - (1e-2 * gradient).bfloat16() == weight.bfloat16()) & (gradient != 0)
        for weight, gradient in zip(model.parameters(), gradients)
    ]
    return float(torch.cat([each.flatten() for each in kept]).double().mean())


def main() -> None:
    torch.set_num_threads(1)
    training, _ = load("synthetic-cifar10", Path("data"), torch.device("cpu"))
    told: dict[str, float] = {}
    for divided, ways in WAYS.items():
        parts = 3 if divided == "micro-batches" else 2
        for wrong in ways:
            bounded_int, cut = (np.array(curve(training, divided, count, wrong)) for count in (1, parts))
            told[f"{divided}: {wrong}"] = float(np.max(np.abs(bounded_int - cut) / np.abs(bounded_int)))
    told["bfloat16 weights: updates lost"] = lost_updates(training)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
