"""Load batches whose random numbers depend only on seed, epoch and example, and count the batches that a loop gets."""

from __future__ import annotations

import copy
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Subset, default_collate, get_worker_info

from samestep.sharding import sample_bits
from samestep.torch.batch_rows import empty_batch
from samestep.torch.samplers import EvalSampler, GlobalBatchSampler, index_array, seed_generators
from samestep.torch.worker_signals import WorkerInit, blocked_stop_signals, remember_workers
from samestep.torch.worker_signals import stop_workers as stop_workers

VERIFIED = 8  # examples that `Seeded` reads twice in each process; a flip of half the examples is found in 99.6%
VERIFY_SECONDS = 0.1  # time of these reads after which no further example is read twice


class Seeded(Dataset[Any]):
    """Read ``dataset[index]`` with ``random``, ``numpy.random`` and torch seeded from (seed, epoch, index).

    Random flips and crops of an example are the same in any worker, batch or rank. A sampler of this package passes the
    epoch with its indices; for other indices the epoch is 0. A read outside a worker finally restores the generators'
    states. Attributes that this class lacks are read from the dataset.

    Args:
        dataset: object with ``__getitem__`` and ``__len__``.
        seed: integer in [0, 2**64).
        verify: whether to read the first examples of each process twice, and to compare the results. The process reads
            up to 8 examples again, until these reads have taken 0.1 seconds.

    Raises:
        TypeError: the dataset does not support an index.
        RuntimeError: raised by one of the first reads of a process if the two results differ. The dataset then draws
            from its own generator.
    """

    def __init__(self, dataset: Any, seed: int = 0, verify: bool = True) -> None:
        if not reads_examples(dataset):
            raise TypeError(f"{type(dataset).__name__} has no examples by number: it needs __getitem__ and __len__")
        self.dataset = dataset
        self.seed = seed
        self._unverified = VERIFIED if verify else 0  # number of examples that this process must still read twice
        self._verify_seconds = 0.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # unpickling reads these attributes before ``dataset`` is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the examples at ``indices``. A DataLoader calls this method with all indices of a batch."""
        is_worker = get_worker_info() is not None
        before = None if is_worker else generator_states()
        try:
            return self._read_all(indices)
        finally:
            if before is not None:
                restore_generators(before)

    def _read_all(self, indices: Sequence[int]) -> list[Any]:
        """Read examples. Compute all seeds together, which is ten times faster than one at a time."""
        epoch = getattr(indices, "epoch", 0)
        numbers = np.asarray(indices, np.int64)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        seeds = sample_bits(self.seed, epoch, numbers).tolist()
        examples = [self._read(number, seed) for number, seed in zip(numbers.tolist(), seeds)]
        for example, number, seed in zip(examples, numbers.tolist(), seeds):
            if self._unverified == 0:
                break
            self._verify(example, number, seed)
        return examples

    def _verify(self, example: Any, number: int, seed: int) -> None:
        """Raise RuntimeError if a second read of an example differs from ``example``."""
        begin = time.perf_counter()
        again = self._read(number, seed)
        self._verify_seconds += time.perf_counter() - begin
        self._unverified -= 1
        if self._verify_seconds > VERIFY_SECONDS:
            self._unverified = 0
        if not equal(example, again):
            raise RuntimeError(
                f"{type(self.dataset).__name__}[{number}] differs between two reads with the same seeds: it draws from "
                "a generator of its own: draw from random, numpy.random or torch, or pass verify=False"
            )

    def _read(self, number: int, seed: int) -> Any:
        seed_generators(seed)
        return self.dataset[number]


def generator_states() -> tuple[Any, Any, Tensor]:
    """Return the states of ``random``, ``numpy.random`` and torch's CPU generator."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore_generators(states: tuple[Any, Any, Tensor]) -> None:
    """Restore the states that `generator_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def equal(one: Any, other: Any) -> bool:
    """Return whether two examples have the same values; True for two objects of a type that cannot be compared here."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Tensor):
        return equal_tensors(one, other)
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and bool(one.tobytes() == other.tobytes())
    if isinstance(one, (int, float, str, bytes)):
        is_nan = bool(one != one)
        return is_nan or bool(one == other)
    return True


def equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; True for a layout that torch cannot compare, such as sparse."""
    try:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    except (NotImplementedError, RuntimeError):  # sparse, nested, quantized, and tensors without content
        return True


class Collate:
    """Collate examples by ``collate_fn``. For an empty shard, return a batch of the usual shapes with 0 rows.

    Args:
        dataset: the dataset, from which an empty shard's first example is read.
        collate_fn: function that collates a list of examples.
        must_draw_nothing: whether the first batch of each process raises RuntimeError if ``collate_fn`` draws random
            numbers. They would depend on the shard.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], must_draw_nothing: bool) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._must_check = must_draw_nothing

    def __call__(self, examples: Any) -> Any:
        """Return a batch. ``examples`` is a list of examples, or a batch that the dataset has created."""
        if not isinstance(examples, list) or examples:
            return self._collate(examples)
        return empty_batch(self._collate(read_first(self._dataset)))

    def _collate(self, examples: Any) -> Any:
        if self._must_check:
            self._must_check = False
            # Copies, because collate_fn may change the examples.
            name = drawn_by(lambda: self._collate_fn(copy.deepcopy(examples)))
            if name:
                raise RuntimeError(
                    f"collate_fn draws from {name}, so a row's random numbers depend on its shard: draw in the "
                    "dataset's __getitem__, or pass seeded=False to DataLoader"
                )
        return self._collate_fn(examples)


def collate_examples(examples: Any) -> Any:
    """Collate a list of examples as torch does. Return unchanged a batch that the dataset has created."""
    return default_collate(examples) if isinstance(examples, list) else examples


def read_first(dataset: Any) -> Any:
    """Read a batch of only the first example, by the same method as a DataLoader's worker."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(index_array(np.zeros(1, np.int64), 0))
    return [dataset[0]]


def reads_examples(dataset: Any) -> bool:
    """Return whether a dataset has its own ``__getitem__``. The method of torch's Dataset only raises an error."""
    return getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__


def reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads batches by its own method ``__getitems__``.

    torch's Subset always has this method, so the result for a Subset is False.
    """
    if isinstance(dataset, Subset):
        return False
    return hasattr(dataset, "__getitems__") and not isinstance(dataset, Seeded)


def check_draws_nothing(dataset: Any) -> None:
    """Raise RuntimeError if a dataset with its own ``__getitems__`` draws random numbers.

    Such random numbers would depend on the batches that this process has read before.
    """
    name = drawn_by(lambda: read_first(dataset))
    if name:
        remedy = "draw by samestep.sharding.sample_bits(seed, indices.epoch, indices), or pass seeded=False"
        if reads_examples(dataset):
            remedy = "pass Seeded(dataset), which reads one example at a time"
        raise RuntimeError(
            f"{type(dataset).__name__}.__getitems__ draws from {name}, which depends on the batches before: {remedy}"
        )


def drawn_by(read: Callable[[], Any]) -> str:
    """Call a function twice. Return the name of a generator from which it draws, also of its own; "" if it draws none.

    The global generators are restored.
    """
    before = generator_states()
    first = read()
    again = read()
    name = drawn_since(before)
    if not name and not equal(first, again):
        name = "a generator of its own"
    return name


def drawn_since(before: tuple[Any, Any, Tensor]) -> str:
    """Restore the generators, and return the name of one whose state has changed; "" if none has.

    Args:
        before: an earlier result of `generator_states`.
    """
    after = generator_states()
    restore_generators(before)
    names = ("random", "numpy.random", "torch")
    return next((name for name, one, other in zip(names, before, after) if not equal(one, other)), "")


class DataLoader(TorchDataLoader[Any]):
    """torch's DataLoader, for a `GlobalBatchSampler` or an `EvalSampler` as ``batch_sampler``.

    This class wraps the dataset in `Seeded`, and counts the batches that the loop receives. For an empty shard, the
    loader returns tensors with 0 rows. The loader's workers survive a stop signal. ``collate_fn`` must draw no random
    numbers, because they would depend on the shard.

    A dataset with a method ``__getitems__`` is not wrapped. The method gets the indices of a batch, an int64 array with
    an attribute ``epoch``, and must draw random numbers by `samestep.sharding.sample_bits`. It returns a list of
    examples, or a batch of another type, such as a tuple of tensors.

    Args:
        dataset: object with ``__len__``, and ``__getitem__`` or ``__getitems__``.
        *args: as in torch.
        seeded: whether to wrap the dataset. Pass False if the dataset draws no random numbers.
        **kwargs: as in torch.

    Raises:
        TypeError: the dataset does not support an index, or ``sampler`` is a sampler of batches.
        ValueError: ``shuffle`` is set without a sampler, the sampler is for another number of examples, or ``in_order``
            is False.
    """

    def __init__(self, dataset: Any, *args: Any, seeded: bool = True, **kwargs: Any) -> None:
        check_sampler_arguments(kwargs)
        sampler = kwargs.get("batch_sampler")
        if kwargs.get("shuffle") and sampler is None and kwargs.get("sampler") is None:
            raise ValueError(
                "shuffle=True has another order at each number of ranks: pass batch_sampler=GlobalBatchSampler(...)"
            )
        if not isinstance(sampler, (GlobalBatchSampler, EvalSampler)):
            sampler = None
        is_whole = reads_batches(dataset)
        if seeded and not is_whole and not isinstance(dataset, Seeded):
            seed = sampler.seed if isinstance(sampler, GlobalBatchSampler) else 0
            dataset = Seeded(dataset, seed)
        if sampler is not None:
            check_length(dataset, sampler)
            sampler.yields_arrays = is_whole
            collate_fn = kwargs.get("collate_fn") or collate_examples
            must_check = seeded and isinstance(sampler, GlobalBatchSampler)
            kwargs["collate_fn"] = Collate(dataset, collate_fn, must_check)
        if kwargs.get("num_workers"):
            method = start_method(kwargs.get("multiprocessing_context"))
            kwargs["worker_init_fn"] = WorkerInit(method, kwargs.get("worker_init_fn"))
        # Without a generator, each iteration would draw its base seed from torch's global generator.
        kwargs.setdefault("generator", torch.Generator())
        super().__init__(dataset, *args, **kwargs)
        self._must_check = seeded and is_whole

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._must_check:
            self._must_check = False
            check_draws_nothing(self.dataset)
        if self.num_workers:
            with blocked_stop_signals(start_method(self.multiprocessing_context)):
                batches = super().__iter__()
            remember_workers(batches)
        else:
            batches = super().__iter__()
        sampler = self.batch_sampler
        return sampler.received(batches) if isinstance(sampler, GlobalBatchSampler) else batches

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Prevent `Accelerator.prepare`, which first reads this attribute, from dividing the batches again.

        Raises:
            RuntimeError: the sampler already divides the batches by rank.
        """
        if isinstance(self.batch_sampler, (GlobalBatchSampler, EvalSampler)):
            raise RuntimeError(
                "Accelerator.prepare would cut this DataLoader's batches among the ranks again: leave it out of prepare"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, with the interface of torchdata's StatefulDataLoader; {} for other samplers."""
        return self.batch_sampler.state_dict() if isinstance(self.batch_sampler, GlobalBatchSampler) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the sampler's position to the position in a saved state."""
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            self.batch_sampler.load_state_dict(state)


def check_sampler_arguments(arguments: dict[str, Any]) -> None:
    """Raise an error if a DataLoader's arguments misuse a sampler of this package.

    Args:
        arguments: the keyword arguments of the DataLoader.

    Raises:
        TypeError: the sampler is passed as ``sampler``.
        ValueError: ``in_order`` is False.
    """
    kinds = (GlobalBatchSampler, EvalSampler)
    sampler = arguments.get("sampler")
    if isinstance(sampler, kinds):
        name = type(sampler).__name__
        raise TypeError(f"{name} yields batches of examples: pass batch_sampler={name}(...) instead of sampler")
    if isinstance(arguments.get("batch_sampler"), kinds) and not arguments.get("in_order", True):
        raise ValueError("in_order=False returns batches in another order than their sampler: leave it out")


def start_method(context: Any) -> str:
    """Return the start method of workers, such as "fork".

    Args:
        context: the argument ``multiprocessing_context`` of a DataLoader.
    """
    if context is None:
        return multiprocessing.get_start_method()
    return context if isinstance(context, str) else str(context.get_start_method())


def check_length(dataset: Any, sampler: GlobalBatchSampler | EvalSampler) -> None:
    """Raise ValueError unless the sampler has the same number of examples as the dataset."""
    expected = sampler.batches.n if isinstance(sampler, GlobalBatchSampler) else sampler.dataset_len
    if len(dataset) != expected:
        raise ValueError(f"the dataset has {len(dataset)} examples, but its sampler has {expected}")
