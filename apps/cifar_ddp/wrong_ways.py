"""Measure what each usual way of writing a step changes.

    .venvs/cifar_ddp/bin/python apps/cifar_ddp/wrong_ways.py      # prints JSON

Train twelve steps in float64 as a whole; then on two ranks, in three micro-batches, or stopped after six steps and
resumed. The output is the largest relative difference of the losses for each way. One process simulates DDP: each
rank's shard, its own random numbers, and the mean of the ranks' gradients. The way "none" is this app's, which differs
by rounding only.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from augment import PADDING, crop_and_flip
from data import Split, load
from options import parse
from samestep import schedules
from samestep.sharding import GlobalBatches, shard, step_seed
from samestep.torch import FixedRows, Rows, exact
from torch import Tensor, nn

BATCH = 25  # neither 2 nor 3 divides it
STEPS = 12
LR = 0.2
SEED = 1
CLIP = 0.5  # norm of the gradient
DECAY = 0.9  # of the averaged weights
# How training is divided, and the usual ways to do it wrong.
WAYS = {
    "ranks": ("none", "mean over ranks", "augmentation", "dropout", "batch norm", "clipping"),
    "micro-batches": ("none", "mean over micro-batches", "dropout"),
    "resumed": ("none", "scheduler", "average"),
}
PLACE = FixedRows()  # of the part that is computed


class Net(nn.Module):
    """Classify by two convolutions, a norm, and dropout that is drawn by the rank or for the global batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2)
        self.conv2 = nn.Conv2d(8, 16, 3, 2)
        self.fc = nn.Linear(16, 10)
        self.norm = norm
        self.dropout = nn.Dropout(0.3)

    def forward(self, parts: Sequence[Tensor], rows: Sequence[Rows], wrong: str) -> list[Tensor]:
        """Map the images of each part to its scores; ``rows`` are the parts' places in the global batch."""
        xs = [self.conv2(F.relu(self.conv1(images))) for images in parts]
        if wrong == "batch norm":  # statistics of each part
            xs = [self.norm(x) for x in xs]
        else:  # statistics of all parts, which an all-reduce of `exact` computes
            normalized = self.norm(torch.cat(xs))
            xs = list(normalized.split([len(x) for x in xs]))
        xs = [F.relu(x).mean((2, 3)) for x in xs]
        state = torch.get_rng_state()
        for i, (x, part_rows) in enumerate(zip(xs, rows)):
            torch.set_rng_state(state)  # all ranks have the same seed
            PLACE.set(*part_rows)
            xs[i] = self.dropout(x)
        return [self.fc(x) for x in xs]


def crop_by_rank(images: Tensor) -> Tensor:
    """Crop as usual: with draws from the generator of the process that has the images."""
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    corners = torch.randint(0, 2 * PADDING + 1, (len(images), 2)).tolist()
    crops = []
    for i, (y, x) in enumerate(corners):
        crops.append(padded[i, y : y + 32, x : x + 32])
    return torch.stack(crops)


def compute_gradients(model: nn.Module, sums: Sequence[Tensor], sizes: Sequence[int], wrong: str) -> list[Tensor]:
    """Return the gradients of the mean loss over the global batch, clipped; ``sums`` are the parts' summed losses."""
    parameters = list(model.parameters())
    if wrong == "clipping":  # each rank clips its own, before DDP averages the gradients
        clipped = []
        for part in sums:
            loss = part * len(sums) / sum(sizes)
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            clipped.append(clip(gradients))
        return [torch.stack(ranks).mean(0) for ranks in zip(*clipped)]
    if wrong.startswith("mean over"):
        means = [part / size for part, size in zip(sums, sizes)]
        loss = torch.stack(means).mean()
    else:
        loss = torch.stack(list(sums)).sum() / sum(sizes)
    return clip(torch.autograd.grad(loss, parameters))


def clip(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Scale gradients down to a norm of at most CLIP."""
    squares = torch.stack([gradient.square().sum() for gradient in gradients])
    norm = squares.sum().sqrt()
    factor = (CLIP / norm).clamp(max=1)
    return [gradient * factor for gradient in gradients]


def train(train_set: Split, divided: str, parts: int, wrong: str) -> list[float]:
    """Return the mean loss of each step's global batch, and at the end the loss of the averaged weights [STEPS + 1]."""
    torch.manual_seed(SEED)
    norm: nn.Module = nn.BatchNorm2d(16)
    if divided == "micro-batches":
        norm = nn.GroupNorm(4, 16)
    model = Net(norm).double()
    if wrong != "dropout":
        exact(model.dropout, PLACE)  # the masks of the global batch
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    count = parts
    resumed_at = STEPS  # never
    if divided == "resumed":
        count = 1
        resumed_at = STEPS // parts
    losses = []
    for step in range(STEPS):
        if step == resumed_at:  # with saved weights and optimizer state
            optimizer.param_groups[0]["lr"] = LR  # as at the start of the program
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            if wrong == "average":
                average = copy.deepcopy(model)
        if wrong != "scheduler":
            optimizer.param_groups[0]["lr"] = LR * schedules.cosine(step, STEPS)
        images, labels, rows = split_batch(train_set, step, count, wrong)
        torch.manual_seed(step_seed(SEED, step))
        scores = model(images, rows, wrong)
        sums = [F.cross_entropy(part, own, reduction="sum") for part, own in zip(scores, labels)]
        sizes = [len(own) for own in labels]
        gradients = compute_gradients(model, sums, sizes, wrong)
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient
        optimizer.step()
        if wrong == "scheduler":
            scheduler.step()
        move(average, model)
        losses.append(torch.stack(sums).sum().item() / BATCH)
    images, labels, rows = split_batch(train_set, STEPS, 1, "none")
    torch.manual_seed(SEED)
    (scores,) = average(images, rows, "none")
    losses.append(F.cross_entropy(scores, labels[0]).item())
    return losses


def move(average: nn.Module, model: nn.Module) -> None:
    """Move the averaged weights towards the model's."""
    for averaged, current in zip(average.parameters(), model.parameters()):
        averaged.data.lerp_(current.data, 1 - DECAY)


def split_batch(train_set: Split, step: int, count: int, wrong: str) -> tuple[list[Tensor], list[Tensor], list[Rows]]:
    """Return a global batch in ``count`` parts: images [m, 3, 32, 32], labels [m], and their rows in the batch."""
    batches = GlobalBatches(len(train_set.labels), BATCH, SEED)
    images = []
    labels = []
    rows = []
    for k in range(count):
        first, last = shard(batches.size(step), k, count)
        indices = batches.indices(step)[first:last]
        chosen = train_set.images[torch.from_numpy(indices)]
        if wrong == "augmentation":
            torch.manual_seed(step_seed(SEED, step))  # all ranks have the same seed
            chosen = crop_by_rank(chosen)
        else:
            chosen = crop_and_flip(chosen, indices, SEED, batches.epoch(step))
        images.append(train_set.normalize(chosen))
        labels.append(train_set.labels[torch.from_numpy(indices)])
        rows.append(Rows(step, first, local=last - first, size=batches.size(step)))
    return images, labels, rows


def lost_updates(train_set: Split) -> float:
    """Return the share of weights that a step does not change if they are bfloat16; in float32 it is nearly zero."""
    torch.manual_seed(SEED)
    model = Net(nn.BatchNorm2d(16))
    images, labels, rows = split_batch(train_set, 0, 1, "none")
    (scores,) = model([images[0].float()], rows, "none")
    loss = F.cross_entropy(scores, labels[0])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    lost = []
    for weight, gradient in zip(model.parameters(), gradients):
        before = weight.bfloat16()
        after = before - (1e-2 * gradient).bfloat16()
        is_lost = (after == before) & (gradient != 0)
        lost.append(is_lost.flatten())
    return float(torch.cat(lost).double().mean())


def main() -> None:
    torch.set_num_threads(1)
    options = parse(["--dataset=synthetic-cifar10", "--dtype=float64"])
    train_set, _ = load(options, torch.device("cpu"))
    differences: dict[str, float] = {}
    for divided, ways in WAYS.items():
        parts = 3 if divided == "micro-batches" else 2
        for wrong in ways:
            expected = np.array(train(train_set, divided, 1, wrong))
            losses = np.array(train(train_set, divided, parts, wrong))
            relative = np.abs(expected - losses) / np.abs(expected)
            differences[f"{divided}: {wrong}"] = float(np.max(relative))
    differences["bfloat16 weights: updates lost"] = lost_updates(train_set)
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
