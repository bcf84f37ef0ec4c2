"""Test the kit's samplers without a process group: their batches, positions and refused arguments."""

from __future__ import annotations

import pickle
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samestep.sharding import GlobalBatches
from samestep.step_timer import StepTimer
from samestep.torch import EvalSampler, FixedRows, GlobalBatchSampler, Rows, exact, global_mean, ranks
from samestep.torch.reduction import time_phases
from torch.utils.data import DataLoader


def batches(sampler: GlobalBatchSampler) -> Iterator[Any]:
    """Return the batches that a loop receives from a loader whose examples equal their indices."""
    return sampler.received(torch.tensor(batch, dtype=torch.int64) for batch in sampler)


def test_ranks_shards_form_the_global_batches_of_the_core() -> None:
    expected = GlobalBatches(10, 4, seed=3)
    samplers = [GlobalBatchSampler(10, 4, rank, 3, seed=3) for rank in range(3)]
    for epoch in range(2):
        for step, shards in enumerate(zip(*map(batches, samplers)), 3 * epoch):
            assert torch.cat(shards).tolist() == expected.indices(step).tolist()
            assert [sampler.rows().size for sampler in samplers] == [expected.size(step)] * 3
            assert [sampler.rows().local for sampler in samplers] == list(map(len, shards))
            firsts = [sampler.rows().first for sampler in samplers]
            assert firsts == [0, len(shards[0]), len(shards[0]) + len(shards[1])]


def test_batches_are_lists_of_ints_that_keep_their_epoch_in_a_worker() -> None:
    sampler = GlobalBatchSampler(10, 4)
    sampler.seek(3)
    batch = pickle.loads(pickle.dumps(next(iter(sampler))))  # noqa: S301
    assert batch.epoch == 1
    assert isinstance(batch, list)
    assert {type(each) for each in batch} == {int}
    sampler.yields_arrays = True
    array = pickle.loads(pickle.dumps(next(iter(sampler))))  # noqa: S301
    assert array.tolist() == list(batch)
    assert array.dtype == np.int64
    assert (array.epoch, array[:2].epoch) == (1, 1)


def test_the_position_counts_received_batches_not_drawn_ones() -> None:
    sampler = GlobalBatchSampler(10, 4)
    loop = batches(sampler)
    next(loop)
    assert (sampler.epoch, sampler.batch, sampler.step) == (0, 1, 1)
    resumed = GlobalBatchSampler(10, 4)
    resumed.load_state_dict(sampler.state_dict())
    assert [each.tolist() for each in batches(resumed)] == [each.tolist() for each in loop]
    assert (resumed.epoch, resumed.batch, resumed.step) == (1, 0, 3)


def test_the_end_of_an_epoch_belongs_to_it_until_its_iteration_has_ended() -> None:
    sampler = GlobalBatchSampler(10, 4)
    loop = batches(sampler)
    for _ in range(3):
        next(loop)
    saved = sampler.state_dict()
    assert (saved["epoch"], saved["step"]) == (0, 3)
    assert list(loop) == []
    assert sampler.epoch == 1
    resumed = GlobalBatchSampler(10, 4)
    resumed.load_state_dict(saved)
    assert resumed.epoch == 0
    assert list(batches(resumed)) == []  # the epoch's evaluation follows
    assert resumed.epoch == 1
    assert len(list(batches(resumed))) == 3


def test_a_loop_that_stops_asking_after_the_last_batch_gets_the_next_epoch() -> None:
    sampler = GlobalBatchSampler(10, 4)
    for epoch in range(3):
        received = [next(loop) for loop in [batches(sampler)] for _ in range(len(sampler))]
        assert (
            torch.cat(received).tolist()
            == np.concatenate([sampler.batches.indices(3 * epoch + k) for k in range(3)]).tolist()
        )
        assert sampler.epoch == epoch


def test_a_break_continues_in_the_same_epoch() -> None:
    sampler = GlobalBatchSampler(10, 4)
    first = next(batches(sampler))
    rest = list(batches(sampler))
    assert sorted(torch.cat([first, *rest]).tolist()) == list(range(10))


def test_an_evaluation_over_training_batches_is_refused() -> None:
    sampler = GlobalBatchSampler(10, 4)
    with torch.no_grad(), pytest.raises(RuntimeError, match="would count as training: evaluate with an EvalSampler"):
        next(batches(sampler))
    assert sampler.step == 0


def test_a_batch_can_be_inspected_before_the_loop() -> None:
    sampler = GlobalBatchSampler(10, 4)
    inspected = next(batches(sampler))
    sampler.seek(0)
    assert next(batches(sampler)).tolist() == inspected.tolist()
    assert sampler.step == 1


def test_set_epoch_stays_at_a_position_in_the_epoch() -> None:
    sampler = GlobalBatchSampler(10, 4)
    next(batches(sampler))
    sampler.set_epoch(0)
    assert sampler.step == 1
    sampler.set_epoch(2)
    assert sampler.step == 6


def test_a_step_seeds_the_generators_alike_on_all_ranks() -> None:
    drawn = []
    for rank in range(2):
        sampler = GlobalBatchSampler(10, 4, rank, 2)
        drawn.append([torch.rand(rank + 1)[0].item() for _ in batches(sampler)])
        assert len(set(drawn[-1])) == 3
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("options", [{"virtual_ranks": 4}, {"accumulate": 3}, {"virtual_ranks": 2, "accumulate": 2}])
def test_micro_batches_cut_a_batch_as_the_core_does(options: dict[str, Any]) -> None:
    for world_size in (1, 3):
        for rank in range(world_size):
            sampler = GlobalBatchSampler(22, 8, rank, world_size, **options)
            core = GlobalBatches(22, 8, 0, rank, world_size, options.get("virtual_ranks"), options.get("accumulate", 1))
            for step, batch in enumerate(batches(sampler)):
                with pytest.raises(RuntimeError, match="micro_batches"):
                    sampler.rows()
                parts = []
                for (cut,) in sampler.micro_batches((batch,)):
                    rows = sampler.rows()
                    parts.append((cut.tolist(), rows.first, rows.local, rows.size, torch.rand(()).item()))
                assert [part[0] for part in parts] == [
                    core.indices(step, each).tolist() for each in core.micro_batches(step)
                ]
                assert [part[1] for part in parts] == [core.rows(step, each).first for each in core.micro_batches(step)]
                assert {part[3] for part in parts} <= {core.size(step)}
                assert len({part[4] for part in parts}) <= 1  # micro-batches share the step's dropout key


def test_micro_batches_cut_arrays_strings_and_other_mappings() -> None:
    """The class of the batches of Hugging Face's tokenizers is a UserDict, too."""
    sampler = GlobalBatchSampler(4, 4, 0, 1, accumulate=2)
    (indices,) = next(batches(sampler)).split(4)
    names = [f"name {index}" for index in indices]
    batch = UserDict(tensor=indices, inner={"array": indices.numpy(), "names": names}, sizes=(28, 28), task="digits")
    parts: list[Any] = list(sampler.micro_batches(batch))
    assert [type(part) for part in parts] == [UserDict, UserDict]
    assert [part["tensor"].tolist() for part in parts] == [indices[:2].tolist(), indices[2:].tolist()]
    assert [part["inner"]["array"].tolist() for part in parts] == [indices[:2].tolist(), indices[2:].tolist()]
    assert [part["inner"]["names"] for part in parts] == [names[:2], names[2:]]
    assert [(part["sizes"], part["task"]) for part in parts] == [((28, 28), "digits")] * 2


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({"x": range(4)}, TypeError, "micro_batches cannot cut a range: return tensors in dicts, lists or tuples"),
        (torch.ones(5, 2), ValueError, r"a Tensor of shape \[5, 2\] in a batch of 4 rows: make the batch its first"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, kind: type[Exception], message: str) -> None:
    sampler = GlobalBatchSampler(4, 4, 0, 1, accumulate=2)
    next(batches(sampler))
    with pytest.raises(kind, match=message):
        next(sampler.micro_batches(batch))


def test_scale_has_the_gradient_of_the_mean_and_the_value_of_this_ranks_part() -> None:
    sampler = GlobalBatchSampler(10, 4, 1, 2)
    next(batches(sampler))
    loss = torch.tensor(6.0, requires_grad=True)
    part = sampler.scale(loss)
    part.backward()
    assert part.item() == 1.5
    assert loss.grad == torch.tensor(2 / 4)
    with_virtual_ranks = GlobalBatchSampler(10, 4, 1, 2, virtual_ranks=2)
    next(batches(with_virtual_ranks))
    loss.grad = None
    with_virtual_ranks.scale(loss).backward()
    assert loss.grad == torch.tensor(1 / 4)


@pytest.mark.parametrize(("settings", "factor"), [({"accumulate": 2}, 2), ({"virtual_ranks": 2}, 1)])
def test_scale_divides_by_the_weight_of_the_step(settings: dict[str, Any], factor: int) -> None:
    sampler = GlobalBatchSampler(10, 4, 1, 2, **settings)
    next(batches(sampler))
    loss = torch.tensor(6.0, requires_grad=True)
    sampler.scale(loss, of=12.0).backward()
    assert loss.grad == torch.tensor(factor / 12)
    assert sampler.scale(0 * loss, of=0.0) == 0


def test_global_mean_is_refused_over_sub_shards() -> None:
    """Its gradient would be too large by the world size, and ranks may call it different numbers of times."""
    sampler = GlobalBatchSampler(10, 4, 0, 1, virtual_ranks=2)
    micro_batches = sampler.micro_batches(next(batches(sampler)))
    loss = torch.tensor(6.0, requires_grad=True)
    for _ in micro_batches:
        with pytest.raises(RuntimeError, match=r"use sampler.scale\(loss_sum, of=...\)"):
            global_mean(loss, of=12.0)
    assert global_mean(loss, of=12.0) == 0.5


@pytest.mark.parametrize("size", [2, 3])
def test_a_micro_batch_with_one_value_per_channel_is_refused(size: int) -> None:
    """Its variance is 0. A batch of 3 rows has micro-batches of 1 and of 2 rows."""
    sampler = GlobalBatchSampler(size, size, 0, 1, accumulate=2)
    norm = exact(torch.nn.BatchNorm1d(3), sampler)
    micro_batches = sampler.micro_batches(next(batches(sampler)))
    with pytest.raises(ValueError, match="more than 1 value per channel in the micro-batch: use drop_last=True"):
        [norm(torch.randn(len(rows), 3)) for rows in micro_batches]


def test_frozen_parameters_are_not_timed() -> None:
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    time_phases(model, optimizer, StepTimer())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_evaluation_blocks_are_the_same_at_any_number_of_ranks() -> None:
    alone = [list(block) for block in EvalSampler(99, 10, rank=0, world_size=1)]
    assert [number for block in alone for number in block] == list(range(99))
    for world_size in (3, 12):
        for even in (False, True):
            samplers = [EvalSampler(99, 10, even=even, rank=r, world_size=world_size) for r in range(world_size)]
            blocks = [[list(block) for block in sampler] for sampler in samplers]
            assert [block for own in blocks for block in own if block] == alone
            assert [len(sampler) for sampler in samplers] == list(map(len, blocks))
            assert len(set(map(len, blocks))) == 1 or not even
            assert [n for sampler in samplers for n in sampler.own_blocks] == list(range(10))
    assert EvalSampler(99, 10, blocks=12, rank=0, world_size=1).num_blocks == 12


def test_fixed_rows_are_those_that_a_program_set() -> None:
    fixed = FixedRows()
    with pytest.raises(RuntimeError, match="call set"):
        fixed.rows()
    fixed.set(3, 4, 2, 8)
    assert fixed.rows() == Rows(3, 4, 2, 8)
    with pytest.raises(ValueError, match="rows 7 to 9 are not part of a global batch of 8 rows"):
        fixed.set(3, 7, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((0, 4), ValueError, "the dataset is empty"),
        ((9, 0), ValueError, "global_batch_size must be at least 1, got 0"),
        ((9, 2.5), TypeError, "global_batch_size must be a whole number, got 2.5"),
        ((True, 2), TypeError, "dataset_len must be a whole number, got True"),
        ((9, 2, 3, 3), ValueError, "rank must be in"),
        ((9, 2, 1), ValueError, "rank is 1 and world_size is None: pass both, or neither"),
        ((9, 2, None, None, -1), ValueError, "seed must be in"),
        ((9, 20, None, None, 0, True), ValueError, "at most 9"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        GlobalBatchSampler(*arguments)


def test_numpy_integers_are_taken() -> None:
    sampler = GlobalBatchSampler(np.int64(9), np.int32(2))  # type: ignore[arg-type]
    assert len(sampler) == 5
    assert type(sampler.batches.n) is int


@pytest.mark.parametrize("virtual_ranks", [0, -1])
def test_virtual_ranks_are_at_least_1(virtual_ranks: int) -> None:
    with pytest.raises(ValueError, match="virtual_ranks must be at least 1"):
        GlobalBatchSampler(9, 2, virtual_ranks=virtual_ranks)


def test_bad_evaluations_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        EvalSampler(10, 0)
    with pytest.raises(ValueError, match="blocks must be at least 1"):
        EvalSampler(10, 5, blocks=0)
    with pytest.raises(ValueError, match="empty"):
        EvalSampler(0, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dataset_len", 10), ("global_batch_size", 3), ("seed", 4), ("drop_last", True), ("virtual_ranks", 2)],
)
def test_a_checkpoint_of_another_order_is_refused(name: str, value: Any) -> None:
    sampler = GlobalBatchSampler(9, 2)
    state = {**sampler.state_dict(), name: value}
    with pytest.raises(ValueError, match=f"the checkpoint has {name} {value}, not .*: set it back, or start anew"):
        sampler.load_state_dict(state)


def test_a_position_that_nobody_counts_is_refused() -> None:
    sampler = GlobalBatchSampler(9, 2)
    list(DataLoader(torch.arange(9), batch_sampler=sampler))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"use samestep.torch.DataLoader, or iterate over sampler.received"):
        sampler.state_dict()
    with pytest.raises(RuntimeError, match="has not received a batch"):
        sampler.rows()


@pytest.mark.parametrize(
    "variables",
    [
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"},
    ],
)
def test_a_rank_without_a_process_group_is_refused(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks._place_without_group.cache_clear()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sampler = GlobalBatchSampler(9, 2)
    with pytest.raises(RuntimeError, match=r"started 2 ranks, but torch has no process group: call .*, or pass rank="):
        iter(sampler)
    with pytest.raises(RuntimeError, match="no process group"):
        len(EvalSampler(9, 2))
    assert len(list(GlobalBatchSampler(9, 2, 0, 2))) == 5
