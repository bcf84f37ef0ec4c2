"""Divide a dataset of texts, by numbers of tokens, into global batches that are the same at any world size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from samestep.data.token_batches import TokenBatches
from samestep.sharding import step_seed
from samestep.torch.batch_rows import map_values
from samestep.torch.samplers import Batch, GlobalBatchSampler, seed_generators, whole_number


class GlobalTokenBatchSampler(GlobalBatchSampler):
    """Yield this rank's samples of each global batch, which has about ``step_tokens`` tokens.

    In each step, iterate over `micro_batches`, and call `scale` with the loss summed over the target tokens. The
    results of all ranks and micro-batches add up to the mean over the target tokens of the global batch.

    The dataset must pad on the right, because `micro_batches` removes the columns after a micro-batch's longest
    example. Padding on the right does not affect the losses of a causal model.

    Args:
        lengths: number of tokens of each example, int64 [n].
        targets: number of target tokens (tokens with a loss) of each example, int64 [n].
        step_tokens: tokens per step, over all ranks.
        micro_tokens: maximum number of tokens of a micro-batch, including padding, to limit the memory.
        rank: as in `GlobalBatchSampler`.
        world_size: as in `GlobalBatchSampler`.
        seed: as in `GlobalBatchSampler`.
        seed_steps: as in `GlobalBatchSampler`, but each micro-batch has its own seed.
        virtual_ranks: the maximum number of ranks, or None. If set, sums over micro-batches have the same bits at any
            world size; see `samestep.torch.reduction.gradient_tree`.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is out of range, or the longest example exceeds a micro-batch or a step.
    """

    batches: TokenBatches

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        targets: Sequence[int] | NDArray[np.int64],
        step_tokens: int,
        micro_tokens: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        seed_steps: bool = True,
        virtual_ranks: int | None = None,
    ) -> None:
        super().__init__(
            len(lengths),
            step_tokens,
            rank,
            world_size,
            seed=seed,
            seed_steps=seed_steps,
            virtual_ranks=virtual_ranks,
        )
        self.batches = TokenBatches(
            lengths=np.asarray(lengths, np.int64),
            targets=np.asarray(targets, np.int64),
            step_tokens=self.batches.global_batch_size,
            micro_tokens=whole_number("micro_tokens", micro_tokens),
            seed=self.batches.seed,
            rank=self.batches.rank,
            world_size=self.batches.world_size,
            virtual_ranks=virtual_ranks,
        )

    @property
    def _is_cut(self) -> bool:
        return True

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Divide the batch that the loop has received last into this rank's micro-batches.

        If a rank has no micro-batches and ``virtual_ranks`` is None, this method yields an empty micro-batch, because
        DDP requires a backward pass on each rank.

        Args:
            batch: as in `GlobalBatchSampler`, but [rows of this rank, tokens, ...] or [rows].
        """
        step = self._current_step()
        micro_batches = self.batches.micro_batches(step)
        if not micro_batches and self.virtual_ranks is None:
            yield batch
        for rows, micro_batch in zip(super().micro_batches(batch), micro_batches):
            yield map_values(_column_slicer(self.batches.longest(step, micro_batch)), rows)

    def _seed_generators(self) -> None:
        if self.seed_steps:
            k, _ = self.micro_batch or (0, 1)
            seed_generators(step_seed(self.seed, self.step - 1) ^ k)

    def _order(self) -> dict[str, Any]:
        return {
            "dataset_len": self.batches.n,
            "num_tokens": self.batches.num_tokens,
            "step_tokens": self.batches.step_tokens,
            "micro_tokens": self.batches.micro_tokens,
            "seed": self.batches.seed,
        }


def _column_slicer(stop: int) -> Any:
    """Return a function that returns the first ``stop`` columns of a tensor or an array, and other values unchanged."""

    def columns_of(value: Any) -> Any:
        has_columns = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 1
        return value[:, :stop] if has_columns else value

    return columns_of
