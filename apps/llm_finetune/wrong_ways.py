"""Measure how much each common mistake in a fine-tuning step changes the losses.

    .venvs/llm_finetune/bin/python apps/llm_finetune/wrong_ways.py      # the last line is JSON

The program trains the tiny model for four steps in float64, first without a mistake, then with each mistake. It
computes a step's micro-batches on four simulated ranks, or accumulates them on one rank. It prints the largest relative
difference of the losses for each mistake. One process simulates DDP: the process uses each rank's micro-batches and
random numbers, and averages the ranks' gradients. The losses differ only by rounding if the training makes no mistake
("none").
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from data import IGNORED, Samples, load
from model import TokenLoss, build_model, load_tokenizer
from numpy.typing import NDArray
from options import parse
from samestep.data.token_batches import TokenBatches
from samestep.sharding import shard, step_seed
from torch import Tensor, nn

RANKS = 4
STEPS = 4
LR = 3e-3
CLIP = 0.5
SIZES = ("--step-tokens=1000", "--micro-tokens=250", "--max-length=200")
COMMON = ("--model=tiny", "--dtype=float64", "--dataset=definitions", *SIZES)
BY_RANK = ("none", "mean over ranks", "clipping", "dropout")
WAYS = ("none", "mean over ranks", "mean over micro-batches", "mean over samples", "clipping", "end as padding")
EVAL_BATCH_SIZE = 8
Part = NDArray[np.int64]  # indices of a micro-batch's samples [m]


class Training:
    """The tiny model, its data and its global batches.

    Args:
        words: options of the app, in addition to COMMON.
    """

    def __init__(self, *words: str) -> None:
        options = parse([*COMMON, *words])
        tokenizer = load_tokenizer(options)
        self.loss = TokenLoss(build_model(options, tokenizer), autocast=False)
        self.end = tokenizer.encode(tokenizer.end)[0]
        self.train_set, self.test_set = load(options, tokenizer)
        self.batches = TokenBatches(
            lengths=self.train_set.lengths,
            targets=self.train_set.targets,
            step_tokens=options.step_tokens,
            micro_tokens=options.micro_tokens,
            seed=options.seed,
        )
        self.parameters = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]

    def sum_of(self, dataset: Samples, part: Part, masks_end: bool = False) -> Tensor:
        """Return the summed loss of a micro-batch. End tokens are not targets if ``masks_end`` is true."""
        tokens, labels = dataset.__getitems__(part)
        if masks_end:
            labels = labels.masked_fill(labels == self.end, IGNORED)
        loss: Tensor = self.loss(tokens, labels)
        return loss

    def backward(self, plan: Sequence[Part], way: str) -> float:
        """Accumulate the gradients of the micro-batches ``plan`` with the mistake ``way``. Return the summed loss."""
        total = 0.0
        targets = sum(int(self.train_set.targets[part].sum()) for part in plan)
        for part in plan:
            if way == "mean over samples":
                total += self._backward_by_sample(part, sum(map(len, plan)))
                continue
            loss = self.sum_of(self.train_set, part, masks_end=way == "end as padding")
            divisor = targets
            if way == "end as padding":
                divisor = targets - sum(map(len, plan))
            if way == "mean over micro-batches":
                divisor = int(self.train_set.targets[part].sum()) * len(plan)
            (loss / divisor).backward()
            total += loss.item()
        return total

    def _backward_by_sample(self, part: Part, samples: int) -> float:
        total = 0.0
        for i in range(len(part)):
            loss = self.sum_of(self.train_set, part[i : i + 1])
            (loss / (int(self.train_set.targets[part[i]]) * samples)).backward()
            total += loss.item()
        return total


def gradients_of_rank(training: Training, step: int, own: Sequence[Part], way: str, ranks: int) -> list[Tensor]:
    """Return the gradients of one rank, before DDP would average them.

    Args:
        training: the model and its data.
        step: number of the step, from 0.
        own: the rank's micro-batches.
        way: name of the mistake, such as "clipping".
        ranks: number of simulated ranks.
    """
    torch.manual_seed(step_seed(1, step))  # all ranks use the same seed, as many programs do
    training.backward(own, way)
    if way != "mean over ranks":  # scale to the rank's part of the mean over the global batch
        targets = sum(int(training.train_set.targets[part].sum()) for part in own)
        for parameter in training.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(ranks * targets / training.batches.num_losses(step))
    if way == "clipping":
        nn.utils.clip_grad_norm_(training.parameters, CLIP)
    gradients = []
    for parameter in training.parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def curve(way: str, ranks: int, *words: str) -> list[float]:
    """Train with the mistake ``way``, and return the mean loss per target before each of STEPS updates.

    Args:
        way: name of the mistake. If BY_RANK contains the name, each simulated rank computes some micro-batches.
            Otherwise, one rank accumulates all micro-batches.
        ranks: number of simulated ranks, if BY_RANK contains ``way``.
        *words: options of the app, in addition to COMMON.
    """
    training = Training(*words)
    optimizer = torch.optim.AdamW(training.parameters, lr=LR, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        plan = training.batches.plan(step)
        with torch.no_grad():
            sums = [training.sum_of(training.train_set, part).item() for part in plan]
        losses.append(sum(sums) / training.batches.num_losses(step))
        optimizer.zero_grad()
        if way in BY_RANK:
            shards = [plan[slice(*shard(len(plan), rank, ranks))] for rank in range(ranks)]
            by_rank = [gradients_of_rank(training, step, own, way, ranks) for own in shards]
            for parameter, gradients in zip(training.parameters, zip(*by_rank)):
                parameter.grad = torch.stack(gradients).mean(0)
        else:
            training.backward(plan, way)
        nn.utils.clip_grad_norm_(training.parameters, CLIP)
        optimizer.step()
    return losses


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference between ``one`` and ``other`` at the same step."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other))


@torch.no_grad()
def evaluation_gap() -> float:
    """Return the relative error of a test loss that is the mean of the batches' mean losses (untrained model)."""
    training = Training("--lora=0")
    test_set = training.test_set
    order = np.arange(len(test_set))
    parts = [order[i : i + EVAL_BATCH_SIZE] for i in range(0, len(order), EVAL_BATCH_SIZE)]
    sums = [training.sum_of(test_set, part).item() for part in parts]
    targets = [int(test_set.targets[part].sum()) for part in parts]
    true = sum(sums) / sum(targets)
    means = [each / count for each, count in zip(sums, targets)]
    return abs(sum(means) / len(means) - true) / true


def main() -> None:
    torch.set_num_threads(1)
    reference = curve("reference", 1, "--lora=0")
    results = {}
    for way in WAYS:
        results[way] = gap(reference, curve(way, RANKS, "--lora=0"))
    dropout = ("--lora=4", "--lora-dropout=0.1")
    results["dropout"] = gap(curve("dropout", 1, *dropout), curve("dropout", RANKS, *dropout))
    results["evaluation: mean over batches"] = evaluation_gap()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
