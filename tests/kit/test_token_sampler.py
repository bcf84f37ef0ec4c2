"""Test `GlobalTokenBatchSampler` in a loop: micro-batches, widths, seeds, scaled losses, and a restored position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samestep.torch import DataLoader, GlobalTokenBatchSampler
from torch import Tensor

LENGTHS = [5, 9, 2, 7, 7, 3, 8, 4, 6, 1, 9, 2]
TARGETS = [1, 8, 1, 3, 7, 2, 1, 4, 2, 1, 5, 1]


class Texts(torch.utils.data.Dataset[Any]):
    """A dataset of token rows: each token of sample i is i + 1, and padding is 0."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitems__(self, indices: Any) -> dict[str, Tensor]:
        longest = max((LENGTHS[i] for i in indices), default=1)
        tokens = torch.zeros(len(indices), longest, dtype=torch.int64)
        for row, i in enumerate(indices):
            tokens[row, : LENGTHS[i]] = int(i) + 1
        return {"tokens": tokens, "numbers": torch.tensor([int(i) for i in indices], dtype=torch.int64)}


def sampler_of(rank: int = 0, world_size: int = 1, **settings: Any) -> GlobalTokenBatchSampler:
    return GlobalTokenBatchSampler(LENGTHS, TARGETS, 20, 12, rank=rank, world_size=world_size, seed=3, **settings)


def steps_of(sampler: GlobalTokenBatchSampler) -> list[list[tuple[list[int], int, float]]]:
    """Return (samples, width, drawn random number) of each micro-batch, for each step of an epoch."""
    steps = []
    for batch in DataLoader(Texts(), batch_sampler=sampler, seeded=False):
        parts = []
        for part in sampler.micro_batches(batch):
            numbers = part["numbers"].tolist()
            parts.append((numbers, part["tokens"].shape[1], torch.rand(()).item()))
        steps.append(parts)
    return steps


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("virtual_ranks", [None, 5])
def test_ranks_share_the_micro_batches_of_one(world_size: int, virtual_ranks: int | None) -> None:
    """A micro-batch has the width of its longest sample. Without virtual ranks, idle ranks get an empty micro-batch."""
    expected = steps_of(sampler_of())
    by_rank = [steps_of(sampler_of(rank, world_size, virtual_ranks=virtual_ranks)) for rank in range(world_size)]
    for step, parts in enumerate(expected):
        found = [part for rank in by_rank for part in rank[step]]
        assert [part for part in found if part[0]] == parts
        assert all(width == max(LENGTHS[i] for i in numbers) for numbers, width, _ in parts)
        idle = max(0, world_size - len(parts))
        assert sum(not numbers for numbers, _, _ in found) == (idle if virtual_ranks is None else 0)
    assert len({draw for parts in expected for _, _, draw in parts}) == sum(map(len, expected))


def test_scaled_losses_add_up_to_the_mean_over_targets() -> None:
    """The gradient of each loss is multiplied by the world size, by which DDP divides."""
    total = torch.zeros(())
    slopes = []
    for rank in range(3):
        sampler = sampler_of(rank, 3)
        batch = next(iter(DataLoader(Texts(), batch_sampler=sampler, seeded=False)))
        for part in sampler.micro_batches(batch):
            numbers = part["numbers"].tolist()
            loss_sum = torch.tensor(float(sum(TARGETS[i] for i in numbers)), requires_grad=True)
            loss = sampler.scale(loss_sum)
            loss.backward()
            total += loss.detach()
            assert loss_sum.grad is not None
            slopes.append(loss_sum.grad.item())
    assert total.item() == pytest.approx(1.0)
    assert slopes == [pytest.approx(3 / sampler_of().batches.num_losses(0))] * len(slopes)


def test_a_restored_position_continues_with_the_next_step() -> None:
    expected = steps_of(sampler_of())
    first = sampler_of()
    for _ in zip(range(2), DataLoader(Texts(), batch_sampler=first, seeded=False)):
        pass
    second = sampler_of()
    second.load_state_dict(first.state_dict())
    assert steps_of(second) == expected[2:]
    with pytest.raises(ValueError, match="micro_tokens"):
        GlobalTokenBatchSampler(LENGTHS, TARGETS, 20, 18, seed=3).load_state_dict(first.state_dict())
