"""Train mnist_ddp's model by one strategy, on this rank's shard of every global batch."""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F
from data import Split
from distributed import collective
from model import build_model
from samestep.env import World
from samestep.sharding import BatchSlice, GlobalBatches, step_seed
from strategies import Strategy
from torch import Tensor

Batch = tuple[Tensor, Tensor, BatchSlice]  # images [m, 1, 28, 28], labels [m], and their rows in the global batch


class Trainer:
    """A trainer of one model. For each step, call `batch`, then `update`."""

    def __init__(self, strategy: Strategy, options: Namespace, split: Split, world: World) -> None:
        """Build the model with the same initial weights on every rank.

        Args:
            strategy: strategy that averages gradients or parameters over ranks.
            options: training options of ``aggregate``.
            split: training set, on the training device.
            world: rank and world size, which determine this rank's shards.
        """
        self.strategy = strategy
        self.split = split
        self.seed = options.seed
        self.world_size = world.world_size
        self.dtype = getattr(torch, options.dtype)
        self.model = build_model(options.dropout, self.dtype, options.seed).to(split.images.device)
        self.module = strategy.prepare(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=options.momentum)
        self.batches = GlobalBatches(
            len(split.labels),
            options.global_batch_size,
            options.seed,
            rank=world.rank,
            world_size=world.world_size,
        )
        self.steps = 0  # number of completed steps

    def batch(self) -> Batch:
        """Return this rank's shard of the next global batch, and set the step's random seed."""
        torch.manual_seed(step_seed(self.seed, self.steps))
        indices = self.batches.indices(self.steps)
        images, labels = self.split.batch(indices, self.dtype)
        return images, labels, self.batches.rows(self.steps)

    def update(self, batch: Batch, is_last: bool = False) -> Tensor:
        """Update once, including the strategy's collectives, and return the summed loss of this rank's shard."""
        images, labels, rows = batch
        self.optimizer.zero_grad()
        scores = self.module(images, rows)
        loss_sum = F.nll_loss(scores, labels, reduction="sum")
        with collective(self.strategy.backward):
            (loss_sum * (self.world_size / rows.global_size)).backward()
        self.strategy.after_backward()
        self.optimizer.step()
        self.strategy.after_step(self.steps, is_last)
        self.steps += 1
        return loss_sum.detach()

    def weights(self) -> Tensor:
        """Return the model's parameters as one vector [n]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
