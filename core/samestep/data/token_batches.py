"""Divide samples of different lengths into global batches and micro-batches by their numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from samestep.sharding import GlobalBatches, permute, shard

Indices = NDArray[np.int64]


def cut_by_tokens(lengths: Indices, indices: Indices, micro_tokens: int) -> list[Indices]:
    """Divide samples into micro-batches of similar lengths.

    Args:
        lengths: number of tokens of each sample in the dataset, int64 [n].
        indices: the samples to divide, int64 [m].
        micro_tokens: maximum number of tokens of a micro-batch, including padding; at least the longest sample.

    Returns:
        The indices of each micro-batch, int64 [rows], with the longest samples first. Samples of equal length keep
        their order.
    """
    order = indices[np.argsort(-lengths[indices], kind="stable")]
    parts = []
    first = 0
    while first < len(order):
        rows = micro_tokens // int(lengths[order[first]])  # the first sample of a micro-batch is the longest
        parts.append(order[first : first + rows])
        first += rows
    return parts


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatches(GlobalBatches):
    """Divide each epoch into steps of about ``step_tokens`` tokens, for samples of different lengths.

    The samples of an epoch, in the epoch's order, form a sequence of tokens. An epoch of S steps divides this sequence
    into S equal parts, and step k contains the samples that begin in part k. Each sample is in one step of an epoch,
    each step has at least one sample, and S is the same in every epoch. Ranks never divide a micro-batch, so each
    micro-batch is the same at any world size.

    The loss is the mean over the target tokens of the global batch; see `num_losses`.

    Args:
        lengths: number of tokens of each sample, int64 [n].
        targets: number of target tokens (tokens with a loss) of each sample, int64 [n].
        step_tokens: tokens per step, over all ranks. A step may exceed this number by less than one sample.
        micro_tokens: maximum number of tokens of a micro-batch, including padding, to limit the memory.
        seed: as in `GlobalBatches`.
        rank: as in `GlobalBatches`.
        world_size: as in `GlobalBatches`.
        virtual_ranks: None, or the maximum number of ranks. The micro-batches do not depend on this number.

    Raises:
        ValueError: an argument is out of range, or the longest sample exceeds a micro-batch or a step.
    """

    lengths: Indices
    targets: Indices
    step_tokens: int
    micro_tokens: int
    n: int = field(init=False)
    global_batch_size: int = field(init=False)
    accumulate: int = field(default=1, init=False)
    drop_last: bool = field(default=False, init=False)
    # The newest result of `_order`, by epoch.
    _epoch_cache: dict[int, tuple[Indices, Indices]] = field(default_factory=dict, init=False, repr=False)
    _plan_cache: dict[int, list[Indices]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, got {self.step_tokens}")
        object.__setattr__(self, "n", len(self.lengths))
        object.__setattr__(self, "global_batch_size", self.step_tokens)
        super().__post_init__()
        if len(self.targets) != self.n:
            raise ValueError(f"lengths has {self.n} samples and targets has {len(self.targets)}: pass one of each")
        if self.lengths.min() < 1 or self.targets.min() < 1:
            raise ValueError("a sample has no token, or none with a loss: leave it out")
        longest = int(self.lengths.max())
        if self.micro_tokens < longest:
            raise ValueError(f"micro_tokens must be at least the longest sample, {longest}, got {self.micro_tokens}")
        if self.num_tokens // self.steps_per_epoch < longest:
            raise ValueError(
                f"step_tokens must be at least twice the longest sample, {longest}, got {self.step_tokens}"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an epoch."""
        return int(self.lengths.sum())

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates in an epoch: tokens / step_tokens, rounded up."""
        return -(-self.num_tokens // self.step_tokens)

    def _order(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the samples of an epoch in order, int64 [n], and the number of tokens before each, int64 [n]."""
        if epoch not in self._epoch_cache:
            order = permute(np.arange(self.n), self.n, self.seed, epoch)
            lengths = self.lengths[order]
            self._epoch_cache.clear()
            self._epoch_cache[epoch] = order, np.cumsum(lengths) - lengths
        return self._epoch_cache[epoch]

    def _locate(self, step: int) -> tuple[int, int, int]:
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        epoch, part = divmod(step, self.steps_per_epoch)
        _, starts = self._order(epoch)
        edges = [-(-k * self.num_tokens // self.steps_per_epoch) for k in (part, part + 1)]
        first, stop = np.searchsorted(starts, edges)
        return epoch, int(first), int(stop)

    def samples_seen(self, step: int) -> int:
        """Return the number of samples in the steps 0 to step - 1, over all ranks."""
        epoch, start, _ = self._locate(step)
        return epoch * self.n + start

    def num_losses(self, step: int) -> int:
        """Return the number of target tokens in this step's global batch, over all ranks."""
        epoch, start, stop = self._locate(step)
        order, _ = self._order(epoch)
        return int(self.targets[order[start:stop]].sum())

    def num_losses_before(self, step: int) -> int:
        """Return the number of target tokens in the steps 0 to step - 1, over all ranks."""
        epoch, start, _ = self._locate(step)
        order, _ = self._order(epoch)
        return epoch * int(self.targets.sum()) + int(self.targets[order[:start]].sum())

    def plan(self, step: int) -> list[Indices]:
        """Return the sample indices of each of this step's micro-batches, int64 [rows], over all ranks."""
        if step not in self._plan_cache:
            epoch, start, stop = self._locate(step)
            order, _ = self._order(epoch)
            self._plan_cache.clear()
            self._plan_cache[step] = cut_by_tokens(self.lengths, order[start:stop], self.micro_tokens)
        return self._plan_cache[step]

    def num_micro_batches(self, step: int) -> int:
        """Return the number of this step's micro-batches, over all ranks."""
        return len(self.plan(step))

    def micro_batches(self, step: int) -> list[tuple[int, int]]:
        """Return (k, count) of each micro-batch that this rank computes. The list may be empty.

        The number k is the micro-batch's index in the step, and count is the number of the step's micro-batches.
        """
        count = self.num_micro_batches(step)
        return [(k, count) for k in range(*shard(count, self.rank, self.world_size))]

    def longest(self, step: int, micro_batch: tuple[int, int]) -> int:
        """Return the number of tokens of a micro-batch's longest sample."""
        k, _ = micro_batch
        return int(self.lengths[self.plan(step)[k][0]])

    def indices(self, step: int, micro_batch: tuple[int, int] = (0, 1)) -> Indices:
        """Return the sample indices, int64 [m], of a micro-batch; by default of all micro-batches of this rank."""
        first, stop = self._shard(step, *micro_batch)
        return np.concatenate([np.empty(0, np.int64), *self.plan(step)])[first:stop]

    def _shard(self, step: int, k: int, count: int) -> tuple[int, int]:
        """Return the rows [first, stop) of the k-th of ``count`` micro-batches, or of this rank for (0, 1)."""
        parts = self.plan(step)
        begin, end = (k, k + 1) if count > 1 else shard(len(parts), self.rank, self.world_size)
        rows = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        return rows[begin], rows[end]
