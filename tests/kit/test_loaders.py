"""Test the kit's DataLoader and `Seeded`: random numbers, empty shards, reads of batches and refused arguments."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit_programs import LIMIT, environment
from processes import marked
from samestep.sharding import sample_bits
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, Seeded, loaders
from samestep.torch.loaders import equal
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset


class Drawing:
    """A dataset whose examples draw one to three numbers from each generator: Python's, NumPy's and torch's."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, Any]:
        count = 1 + index % 3
        numbers = [random.random() for _ in range(count)] + np.random.rand(count).tolist() + torch.rand(count).tolist()
        return index, torch.tensor(sum(numbers))


class Batches:
    """A dataset that reads all examples of a batch at once, and draws random numbers from `sample_bits`."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert indices.dtype == np.int64
        bits = sample_bits(5, indices.epoch, indices) >> np.uint64(40)
        return torch.tensor(indices), torch.tensor(bits.astype(np.int64))


def by_example(dataset: Any, workers: int, world_size: int, epochs: int = 2, **options: Any) -> dict[Any, float]:
    """Return ``{(epoch, index): drawn number}`` of the examples of all ranks."""
    found = {}
    for rank in range(world_size):
        sampler = GlobalBatchSampler(10, 4, rank, world_size, seed=2)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, **options)
        for epoch in range(epochs):
            for numbers, values in loader:
                found.update({(epoch, int(n)): float(value) for n, value in zip(numbers, values)})
    return found


def test_an_examples_numbers_depend_on_it_and_the_epoch_alone() -> None:
    expected = by_example(Drawing(), workers=0, world_size=1)
    assert len(set(expected.values())) == 20
    assert by_example(Drawing(), workers=0, world_size=3) == expected
    assert by_example(Drawing(), workers=2, world_size=2, epochs=1) == {k: v for k, v in expected.items() if k[0] == 0}
    subset: Any = Subset(Drawing(), range(10))  # type: ignore[arg-type]
    assert by_example(subset, workers=0, world_size=2) == expected


def test_a_dataset_that_reads_whole_batches_gets_arrays_with_their_epoch() -> None:
    options: dict[str, Any] = {"collate_fn": lambda batch: batch}
    expected = by_example(Batches(), 0, 1, **options)
    assert len(set(expected.values())) == 20
    assert by_example(Batches(), 0, 3, **options) == expected
    evaluation = DataLoader(Batches(), batch_sampler=EvalSampler(10, 4, rank=0, world_size=1), **options)
    assert torch.cat([numbers for numbers, _ in evaluation]).tolist() == list(range(10))


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_leave_the_generators_of_the_loop_as_no_workers_do(start_method: str) -> None:
    drawn = {}
    for workers in (0, 1):
        sampler = GlobalBatchSampler(10, 4, 0, 1, seed_steps=False)
        context = start_method if workers else None
        loader = DataLoader(Drawing(), batch_sampler=sampler, num_workers=workers, multiprocessing_context=context)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        drawn[workers] = [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in loader]
    assert drawn[0] == drawn[1]


def test_an_empty_shard_has_tensors_without_rows() -> None:
    for dataset, options in (([(torch.ones(3, 2), "a", 1.5)] * 10, {}), (Drawing(), {})):
        sampler = GlobalBatchSampler(10, 3, 2, 3)
        *_, last = DataLoader(dataset, batch_sampler=sampler, **options)
        assert len(last[0]) == 0
    x, _, y = list(DataLoader([(torch.ones(3, 2), "a", 1.5)] * 10, batch_sampler=GlobalBatchSampler(10, 3, 2, 3)))[-1]
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 3, 2), torch.float32, (0,), torch.float64)


def test_persistent_workers_count_over_epochs() -> None:
    sampler = GlobalBatchSampler(10, 4, 0, 1)
    loader = DataLoader(torch.arange(10), batch_sampler=sampler, num_workers=1, persistent_workers=True)
    expected = np.concatenate([sampler.batches.indices(step) for step in range(6)]).tolist()
    assert torch.cat([batch for _ in range(2) for batch in loader]).tolist() == expected
    assert loader.state_dict()["step"] == 6


LEFT_IN_AN_EPOCH = """
import torch
from samestep.torch import DataLoader, GlobalBatchSampler

if __name__ == "__main__":
    sampler = GlobalBatchSampler(200, 8, 0, 1)
    batches = iter(DataLoader(torch.arange(200), batch_sampler=sampler, num_workers=2, persistent_workers=True))
    next(batches)
"""


def test_a_program_that_leaves_an_epoch_ends_with_its_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEFT_IN_AN_EPOCH)
    mark = {"SAMESTEP_TEST": str(tmp_path)}
    subprocess.run([sys.executable, str(program)], env=environment(**mark), timeout=LIMIT, check=True)
    assert marked("SAMESTEP_TEST", str(tmp_path)) == []


class OwnGenerator(Drawing):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.generator.random())


def test_a_dataset_with_a_generator_of_its_own_is_refused() -> None:
    loader = DataLoader(OwnGenerator(), batch_sampler=GlobalBatchSampler(10, 4, 0, 1))
    with pytest.raises(RuntimeError, match=r"OwnGenerator\[\d\] differs between two reads with the same seeds"):
        next(iter(loader))
    assert len(list(DataLoader(OwnGenerator(), batch_sampler=GlobalBatchSampler(10, 4, 0, 1), seeded=False))) == 3
    Seeded(OwnGenerator(), verify=False)[0]


class Counting(Drawing):
    """A dataset that draws from its own generator only in its last example, and counts its reads."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.generator.random() if index == 9 else index


def test_the_first_8_examples_of_a_process_are_compared() -> None:
    dataset = Seeded(Counting())
    dataset.__getitems__([0, 1, 2, 3])
    dataset.__getitems__([4, 5])
    with pytest.raises(RuntimeError, match=r"Counting\[9\] differs between two reads"):
        dataset.__getitems__([6, 9])
    dataset.__getitems__([9, 8])
    assert dataset.dataset.reads == 18


def test_slow_examples_are_not_compared_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "VERIFY_SECONDS", 0)
    dataset = Seeded(Counting())
    dataset.__getitems__([0, 1, 9])
    assert dataset.dataset.reads == 4


class DrawingBatches(Batches):
    def __getitems__(self, indices: Any) -> Any:
        return torch.rand(len(indices))


@pytest.mark.parametrize("other", [np.zeros((2, 1), np.int32), np.zeros(2, np.float32), np.ones(2, np.int32)])
def test_examples_of_another_shape_or_dtype_or_value_are_not_equal(other: Any) -> None:
    assert equal(np.zeros(2, np.int32), np.zeros(2, np.int32))
    assert not equal(np.zeros(2, np.int32), other)


@pytest.mark.parametrize("layout", ["sparse", "compressed", "nested", "meta"])
def test_a_collate_function_may_return_tensors_that_torch_cannot_compare(layout: str) -> None:
    convert: dict[str, Callable[[Tensor], Tensor]] = {
        "sparse": Tensor.to_sparse,
        "compressed": Tensor.to_sparse_csr,
        "nested": lambda rows: torch.nested.nested_tensor(list(rows)),
        "meta": lambda rows: rows.to("meta"),
    }
    sampler = GlobalBatchSampler(4, 2, rank=0, world_size=1)
    loader = DataLoader(range(4), batch_sampler=sampler, collate_fn=lambda rows: convert[layout](torch.eye(len(rows))))
    assert len(list(loader)) == 2


def test_whole_batches_that_draw_from_a_global_generator_are_refused() -> None:
    options: dict[str, Any] = {"batch_sampler": GlobalBatchSampler(10, 4, 0, 1), "collate_fn": lambda batch: batch}
    with pytest.raises(RuntimeError, match=r"DrawingBatches.__getitems__ draws from torch, .*sample_bits"):
        next(iter(DataLoader(DrawingBatches(), **options)))
    next(iter(DataLoader(DrawingBatches(), **options, seeded=False)))


def test_batches_of_a_torch_dataset_without_getitem_are_advised_to_use_sample_bits() -> None:
    """torch's Dataset has a __getitem__ that only raises NotImplementedError, so Seeded could read no example."""

    class Whole(DrawingBatches, Dataset[Any]):
        pass

    loader = DataLoader(Whole(), batch_sampler=GlobalBatchSampler(10, 4, 0, 1), collate_fn=lambda batch: batch)
    with pytest.raises(
        RuntimeError, match=r"Whole.__getitems__ draws from torch, .*: draw by samestep.sharding.sample"
    ):
        next(iter(loader))
    with pytest.raises(TypeError, match="Whole has no examples by number: it needs __getitem__ and __len__"):
        Seeded(Whole())


def test_batches_of_examples_by_number_are_advised_to_be_seeded() -> None:
    class Whole(DrawingBatches, Drawing):
        pass

    loader = DataLoader(Whole(), batch_sampler=GlobalBatchSampler(10, 4, 0, 1))
    with pytest.raises(RuntimeError, match=r"Whole.__getitems__ draws from torch, .*: pass Seeded\(dataset\)"):
        next(iter(loader))
    assert len(list(DataLoader(Seeded(Whole()), batch_sampler=GlobalBatchSampler(10, 4, 0, 1)))) == 3


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="Stream has no examples by number: it needs __getitem__ and __len__"):
        Seeded(Stream())
    with pytest.raises(ValueError, match="pass batch_sampler=GlobalBatchSampler"):
        DataLoader([1], shuffle=True)
    for sampler in (GlobalBatchSampler(9, 2), EvalSampler(9, 2)):
        with pytest.raises(ValueError, match="the dataset has 1 examples, but its sampler has 9"):
            DataLoader([1], batch_sampler=sampler)
        with pytest.raises(TypeError, match=r"yields batches of examples: pass batch_sampler=.*instead of sampler"):
            DataLoader([1], sampler=sampler)
        with pytest.raises(ValueError, match="in_order=False returns batches in another order than their sampler"):
            DataLoader([1], batch_sampler=sampler, num_workers=1, in_order=False)


def test_seeded_passes_attributes_on() -> None:
    dataset = Drawing()
    dataset.classes = ["a", "b"]  # type: ignore[attr-defined]
    assert Seeded(dataset).classes == ["a", "b"]
    assert len(Seeded(dataset)) == 10
    with pytest.raises(AttributeError, match="colors"):
        _ = Seeded(dataset).colors


@pytest.mark.parametrize("workers", [0, 1])
def test_a_program_restored_at_the_end_of_an_epoch_gets_an_iteration_without_batches(workers: int) -> None:
    sampler = GlobalBatchSampler(10, 4, 0, 1)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 1, "step": 6})
    loader = DataLoader(torch.arange(10), batch_sampler=sampler, num_workers=workers)
    assert [len(list(loader)) for _ in range(2)] == [0, 3]
    assert sampler.epoch == 3


def test_a_collate_function_that_draws_is_refused() -> None:
    def draw(examples: list[Tensor]) -> Tensor:
        return torch.rand(len(examples))

    sampler = GlobalBatchSampler(8, 4, 0, 1)
    with pytest.raises(RuntimeError, match=r"collate_fn draws from torch, .*, or pass seeded=False to DataLoader"):
        next(iter(DataLoader(torch.arange(8.0), batch_sampler=sampler, collate_fn=draw)))
    assert len(next(iter(DataLoader(torch.arange(8.0), batch_sampler=sampler, collate_fn=draw, seeded=False)))) == 4


def test_an_empty_shard_has_the_batchs_own_type() -> None:
    """The class of the batches of Hugging Face's tokenizers is a UserDict, too."""

    class Batch(UserDict[str, Tensor]):
        pass

    def collate(examples: list[Tensor]) -> Batch:
        return Batch(x=torch.stack(examples))

    sampler = GlobalBatchSampler(4, 1, rank=1, world_size=2)
    (batch, *_) = DataLoader(torch.arange(4.0), batch_sampler=sampler, collate_fn=collate)
    assert isinstance(batch, Batch)
    assert batch["x"].shape == (0,)
