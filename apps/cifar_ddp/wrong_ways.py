"""Measure how much each common mistake in a training step changes the losses.

    .venvs/cifar_ddp/bin/python apps/cifar_ddp/wrong_ways.py      # prints JSON

The program trains twelve steps in float64 on undivided global batches. Then it trains again on two ranks, in three
micro-batches, or with a resume after six steps. It prints the largest relative difference of the losses for each
mistake. One process simulates DDP with each rank's shard and random numbers, and averages the ranks' gradients.
The losses differ only by rounding if the training makes no mistake ("none").
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

BATCH = 25  # global batch size, not divisible by 2 or 3
STEPS = 12
LR = 0.2
SEED = 1
CLIP = 0.5  # maximum norm of the gradient
DECAY = 0.9  # decay of the averaged weights
# The mistakes to measure for each way to divide the training.
WAYS = {
    "ranks": ("none", "mean over ranks", "augmentation", "dropout", "batch norm", "clipping"),
    "micro-batches": ("none", "mean over micro-batches", "dropout"),
    "resumed": ("none", "scheduler", "average"),
}
PLACE = FixedRows()  # rows of the global batch that the current part contains


class Net(nn.Module):
    """Classify images by two convolutions, a norm, dropout and a linear layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2)
        self.conv2 = nn.Conv2d(8, 16, 3, 2)
        self.fc = nn.Linear(16, 10)
        self.norm = norm
        self.dropout = nn.Dropout(0.3)

    def forward(self, parts: Sequence[Tensor], rows: Sequence[Rows], wrong: str) -> list[Tensor]:
        """Map the images of each part to scores.

        Args:
            parts: images [m, 3, 32, 32] of each part of the global batch.
            rows: rows of the global batch that each part contains.
            wrong: the mistake; "batch norm" normalizes each part by its own statistics.

        Returns:
            Scores [m, 10] of each part.
        """
        xs = [self.conv2(F.relu(self.conv1(images))) for images in parts]
        if wrong == "batch norm":  # normalize by each part's own statistics
            xs = [self.norm(x) for x in xs]
        else:  # normalize by the statistics of all parts; on several ranks, `exact` all-reduces these statistics
            normalized = self.norm(torch.cat(xs))
            xs = list(normalized.split([len(x) for x in xs]))
        xs = [F.relu(x).mean((2, 3)) for x in xs]
        state = torch.get_rng_state()
        for i, (x, part_rows) in enumerate(zip(xs, rows)):
            torch.set_rng_state(state)  # all ranks use the same seed
            PLACE.set(*part_rows)
            xs[i] = self.dropout(x)
        return [self.fc(x) for x in xs]


def crop_by_rank(images: Tensor) -> Tensor:
    """Return the images, each padded and cropped to 32 x 32 at a position that torch's global generator draws."""
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    corners = torch.randint(0, 2 * PADDING + 1, (len(images), 2)).tolist()
    crops = []
    for i, (y, x) in enumerate(corners):
        crops.append(padded[i, y : y + 32, x : x + 32])
    return torch.stack(crops)


def compute_gradients(model: nn.Module, sums: Sequence[Tensor], sizes: Sequence[int], wrong: str) -> list[Tensor]:
    """Return the clipped gradients of the mean loss over the global batch, computed with the mistake ``wrong``.

    Args:
        model: model with the parameters to differentiate.
        sums: summed loss of each part.
        sizes: number of samples of each part.
        wrong: the mistake, a string in the values of WAYS.
    """
    parameters = list(model.parameters())
    if wrong == "clipping":  # each rank clips its gradients before DDP averages them
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
    """Return the gradients, scaled down to a total norm of at most CLIP."""
    squares = torch.stack([gradient.square().sum() for gradient in gradients])
    norm = squares.sum().sqrt()
    factor = (CLIP / norm).clamp(max=1)
    return [gradient * factor for gradient in gradients]


def train(train_set: Split, divided: str, parts: int, wrong: str) -> list[float]:
    """Return losses [STEPS + 1]: each step's mean loss over the global batch, then the loss of the averaged weights.

    Args:
        train_set: training set, from which the global batches come.
        divided: key of WAYS.
        parts: number of ranks, micro-batches or runs.
        wrong: the mistake, a string in ``WAYS[divided]``.
    """
    torch.manual_seed(SEED)
    norm: nn.Module = nn.BatchNorm2d(16)
    if divided == "micro-batches":
        norm = nn.GroupNorm(4, 16)
    model = Net(norm).double()
    if wrong != "dropout":
        exact(model.dropout, PLACE)  # draw a mask for each row of the global batch
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    count = parts
    resumed_at = STEPS  # no resume
    if divided == "resumed":
        count = 1
        resumed_at = STEPS // parts
    losses = []
    for step in range(STEPS):
        if step == resumed_at:  # keep weights and optimizer state, as if they came from a checkpoint
            optimizer.param_groups[0]["lr"] = LR  # a restarted program begins with this rate
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
    """Move the averaged weights towards the weights of ``model`` by the fraction 1 - DECAY."""
    for averaged, current in zip(average.parameters(), model.parameters()):
        averaged.data.lerp_(current.data, 1 - DECAY)


def split_batch(train_set: Split, step: int, count: int, wrong: str) -> tuple[list[Tensor], list[Tensor], list[Rows]]:
    """Split a global batch into ``count`` parts, and return each part's images [m, 3, 32, 32], labels [m] and rows.

    Args:
        train_set: training set, from which the global batches come.
        step: number of the step, from 0.
        count: number of parts.
        wrong: the mistake, a string in the values of WAYS.
    """
    batches = GlobalBatches(len(train_set.labels), BATCH, SEED)
    images = []
    labels = []
    rows = []
    for k in range(count):
        first, last = shard(batches.size(step), k, count)
        indices = batches.indices(step)[first:last]
        chosen = train_set.images[torch.from_numpy(indices)]
        if wrong == "augmentation":
            torch.manual_seed(step_seed(SEED, step))  # all ranks use the same seed
            chosen = crop_by_rank(chosen)
        else:
            chosen = crop_and_flip(chosen, indices, SEED, batches.epoch(step))
        images.append(train_set.normalize(chosen))
        labels.append(train_set.labels[torch.from_numpy(indices)])
        rows.append(Rows(step, first, local=last - first, size=batches.size(step)))
    return images, labels, rows


def lost_updates(train_set: Split) -> float:
    """Return the fraction of weights that have a nonzero gradient, but do not change in an SGD step in bfloat16.

    The same fraction in float32 is nearly 0.
    """
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
