"""Cut a dataset into global batches that are the same at any number of ranks, and into blocks of an evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, Protocol, TypeVar, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Sampler

from samestep.sharding import GlobalBatches, eval_batches, shard, step_seed
from samestep.torch.losses import with_gradient
from samestep.torch.ranks import Group, GroupOrAxis, Place, has_group, place, process_group

Batch = TypeVar("Batch")


class IndexList(list[int]):
    """The numbers of a batch's examples. ``epoch`` is the epoch that the batch belongs to."""

    epoch = 0


class IndexArray(np.ndarray[Any, np.dtype[np.int64]]):
    """The numbers of a batch's examples, int64 [m]. ``epoch`` is the epoch that the batch belongs to."""

    epoch = 0

    def __array_finalize__(self, source: Any) -> None:
        self.epoch = getattr(source, "epoch", 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return index_array, (np.asarray(self), self.epoch)


def index_array(numbers: NDArray[np.int64], epoch: int) -> IndexArray:
    array = numbers.view(IndexArray)
    array.epoch = epoch
    return array


def index_list(numbers: NDArray[np.int64], epoch: int) -> IndexList:
    values = IndexList(numbers.tolist())
    values.epoch = epoch
    return values


Indices = Union[IndexArray, IndexList]


class Rows(NamedTuple):
    """The rows of a global batch that a rank computes.

    Attributes:
        step: number of updates before this one.
        first: index of this rank's first row.
        local: number of this rank's rows, which may be 0.
        size: number of rows of the global batch, over all ranks.
    """

    step: int
    first: int
    local: int
    size: int


class HasRows(Protocol):
    """An object that knows the rows of the batch that is computed now."""

    def rows(self) -> Rows:
        """Return the rows of the current batch."""


class FixedRows:
    """Rows that a program sets itself before each forward pass.

    Use it for `exact` if batches do not come from a `GlobalBatchSampler`. Seed torch's CPU generator alike on all ranks
    before each forward pass, for example with `samestep.sharding.step_seed`: masks of dropout come from it.

    Args:
        virtual_ranks: if set, batch norms take the statistics of each forward pass alone, without other ranks.
        group: the ranks that take different data, as in `GlobalBatchSampler`.
    """

    def __init__(self, virtual_ranks: int | None = None, group: GroupOrAxis = None) -> None:
        self.virtual_ranks = virtual_ranks
        self.group = process_group(group)
        self._rows: Rows | None = None

    def set(self, step: int, first: int, local: int, size: int) -> None:
        """Set the rows of the next forward pass; see `Rows`. Raises ValueError if they do not fit.

        Args:
            step: number of the update, from 0.
            first: index of this rank's first row in the global batch.
            local: number of this rank's rows.
            size: rows of the global batch, over all ranks.
        """
        if first < 0 or local < 0 or first + local > size:
            raise ValueError(f"rows {first} to {first + local} are not part of a global batch of {size} rows")
        self._rows = Rows(step, first, local, size)

    def rows(self) -> Rows:
        """Return the rows. Raises RuntimeError before the first `set`."""
        if self._rows is None:
            raise RuntimeError("FixedRows has no rows yet: call set(step, first, local, size) before the forward pass")
        return self._rows


class GlobalBatchSampler(Sampler[Indices]):
    """Yield this rank's shard of each global batch, for the argument ``batch_sampler`` of a DataLoader.

    An epoch is a permutation of the dataset, which is computed and never stored. Shards of a batch differ in size by at
    most one, and may be empty. Each batch is one step of the optimizer. The position counts steps over all epochs: an
    iteration begins at the position, and stops at the end of its epoch. A position at the end of an epoch belongs to
    this epoch until its iteration has ended. If a program is restored there, the iteration yields no batch, and the
    program's evaluation follows.

    The kit's `DataLoader` counts the batches that the loop has received. Another DataLoader with workers reads ahead:
    iterate over `received` of it.

    Args:
        dataset_len: number of examples.
        global_batch_size: examples of a step, over all ranks.
        rank, world_size: this process's place; by default the process group's at the first iteration.
        seed: integer in [0, 2**64) that decides the order of examples and the random numbers of `Seeded`.
        drop_last: leave out an epoch's last batch if it is smaller.
        seed_steps: seed ``random``, ``numpy.random`` and torch from (seed, step) when the loop receives a batch, on all
            ranks alike.
        virtual_ranks: number of sub-shards of a global batch, or None. Sums over sub-shards have the same bits at any
            number of ranks; see `samestep.torch.reduction.gradient_tree`.
        accumulate: number of micro-batches of a step. With this argument or ``virtual_ranks``, iterate over
            `micro_batches` in each step.
        group: the ranks that take different data: a process group, or an axis of a device mesh, such as ``mesh["dp"]``.
            By default all ranks.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: an argument is out of range, no batch remains, or ``group`` is a mesh of several axes.
    """

    def __init__(
        self,
        dataset_len: int,
        global_batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        seed_steps: bool = True,
        virtual_ranks: int | None = None,
        accumulate: int = 1,
        group: GroupOrAxis = None,
    ) -> None:
        dataset_len = whole_number("dataset_len", dataset_len)
        check_not_empty(dataset_len)
        if virtual_ranks is not None:
            virtual_ranks = whole_number("virtual_ranks", virtual_ranks)
            if virtual_ranks < 1:
                raise ValueError(f"virtual_ranks must be at least 1, got {virtual_ranks}")
        self.group = process_group(group)
        self._given = checked_place(rank, world_size, self.group)
        # Some frameworks make samplers before the process group. `__iter__` then looks the place up.
        rank, world_size = self._given or (place(self.group) if has_group() else Place(0, 1))
        self.batches = GlobalBatches(
            dataset_len,
            whole_number("global_batch_size", global_batch_size),
            seed=whole_number("seed", seed),
            rank=rank,
            world_size=world_size,
            virtual_ranks=virtual_ranks,
            accumulate=whole_number("accumulate", accumulate),
            drop_last=drop_last,
        )
        self.seed_steps = seed_steps
        self.yields_arrays = False  # the kit's DataLoader sets it for a dataset that reads whole batches
        self._epoch = 0
        self._batch = 0  # steps done in this epoch; equal to len(self) at its end
        self._is_drawn = False
        self._is_counted = False
        self._has_received_last = False  # the loop has received the epoch's last batch, in this process
        self.micro_batch: tuple[int, int] | None = (
            None  # (k, count) while `micro_batches` yields it, for `GradientTree.add`
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.batches.steps_per_epoch

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self.batches.seed

    @property
    def virtual_ranks(self) -> int | None:
        """The number of sub-shards of a global batch, or None."""
        return self.batches.virtual_ranks

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0. It changes when an iteration ends."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of steps done in this epoch: ``enumerate(loader, sampler.batch)`` is right after a resume."""
        return self._batch

    @property
    def step(self) -> int:
        """The number of steps done, over all epochs."""
        return self._epoch * len(self) + self._batch

    def seek(self, step: int) -> None:
        """Go to the position after ``step`` steps, for example to the start of an epoch at a multiple of its length."""
        self._go_to(*divmod(whole_number("step", step), len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; stay at a position in it. Frameworks call this method; a loop need not."""
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    def __iter__(self) -> Iterator[Indices]:
        rank, world_size = self._given or place(self.group)
        self.batches = replace(self.batches, rank=rank, world_size=world_size)
        if self._has_received_last:  # the loop has left its iteration at that step
            self._go_to(self._epoch + 1, 0)
        return self._indices(self._epoch, self._batch)

    def _indices(self, epoch: int, first: int) -> Iterator[Indices]:
        for batch in range(first, len(self)):
            self._is_drawn = True
            numbers = self._indices_of(epoch * len(self) + batch)
            yield index_array(numbers, epoch) if self.yields_arrays else index_list(numbers, epoch)

    def _indices_of(self, step: int) -> NDArray[np.int64]:
        """Return the samples of all micro-batches of this rank, in their order."""
        if not self._is_cut:
            return self.batches.indices(step)
        parts = [self.batches.indices(step, micro_batch) for micro_batch in self.batches.micro_batches(step)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    @property
    def _is_cut(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.batches.virtual_ranks is not None or self.batches.accumulate > 1

    def received(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of ``loader``, and count each one as received.

        Args:
            loader: a loader that reads this sampler, or a new iteration of it.
        """
        batches = iter(loader)
        self._is_counted = True
        return self._count(batches, self._epoch)

    def _count(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        for batch in batches:
            self._epoch = epoch
            self._batch += 1
            self._has_received_last = self._batch == len(self)
            self._seed_generators()
            yield batch
        self._go_to(epoch + 1, 0)

    def _go_to(self, epoch: int, batch: int) -> None:
        self._epoch = epoch
        self._batch = batch
        self._has_received_last = False

    def _seed_generators(self) -> None:
        if self.seed_steps:
            seed_generators(step_seed(self.seed, self.step - 1))

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Cut the batch that the loop has received last into this rank's micro-batches.

        While a micro-batch is computed, `rows` returns its rows. The generators are seeded again before each, so that
        dropout masks do not depend on the cut.

        Args:
            batch: tensors, or lists, tuples and dicts of tensors; their first dimension is the rank's rows.
        """
        step = self._current_step()
        begin = 0
        for micro_batch in self.batches.micro_batches(step):
            end = begin + len(self.batches.local_rows(step, micro_batch))
            self.micro_batch = micro_batch
            self._seed_generators()
            try:
                yield tree_map(_slicer(begin, end), batch)
            finally:
                self.micro_batch = None
            begin = end

    def rows(self) -> Rows:
        """Return the rows of the batch, or of the micro-batch, that the loop has received last.

        Raises:
            RuntimeError: no batch has been received, or the step is cut and `micro_batches` does not run.
        """
        step = self._current_step()
        if self._is_cut and self.micro_batch is None:
            raise RuntimeError("a step has several micro-batches: iterate over sampler.micro_batches(batch)")
        local = self.batches.local_rows(step, self.micro_batch or (0, 1))
        return Rows(step, local.start, len(local), self.batches.size(step))

    def _current_step(self) -> int:
        if not self._is_counted or self._batch == 0:
            raise RuntimeError(
                "the loop has not received a batch: use samestep.torch.DataLoader, or sampler.received(loader)"
            )
        return self.step - 1

    def scale(self, loss_sum: Tensor, grad_scale: float | None = None) -> Tensor:
        """Return a loss with the gradient of the mean over the global batch's examples, without communication.

        Args:
            loss_sum: sum of the losses of this rank's batch or micro-batch.
            grad_scale: factor of the gradient; by default the number of ranks, because DDP divides by it. With
                ``virtual_ranks``, and wherever gradients are summed over ranks, it is 1.

        Returns:
            This rank's part of the mean: the parts of all ranks and micro-batches add up to it.
        """
        size = self.batches.num_losses(self._current_step())
        if grad_scale is None:
            grad_scale = 1 if self.virtual_ranks else self.batches.world_size
        return with_gradient(loss_sum, loss_sum.detach() / size, slope=grad_scale / size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings of the order. Call it after an optimizer step.

        Raises:
            RuntimeError: batches were drawn, but not counted.
        """
        if self._is_drawn and not self._is_counted:
            raise RuntimeError(
                "batches were drawn, but nothing counts those that the loop received: use samestep.torch.DataLoader, "
                "or iterate over sampler.received(loader)"
            )
        return {"step": self.step, "epoch": self._epoch, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises ValueError if it belongs to another order of examples."""
        for name, value in self._order().items():
            if state[name] != value:
                raise ValueError(f"the checkpoint has {name} {state[name]}, not {value}: set it back, or start anew")
        self._go_to(state["epoch"], state["step"] - state["epoch"] * len(self))

    def _order(self) -> dict[str, Any]:
        return {
            "dataset_len": self.batches.n,
            "global_batch_size": self.batches.global_batch_size,
            "seed": self.batches.seed,
            "drop_last": self.batches.drop_last,
            "virtual_ranks": self.batches.virtual_ranks,
            "accumulate": self.batches.accumulate,
        }


class EvalSampler(Sampler[Indices]):
    """Yield this rank's blocks of a dataset, for the argument ``batch_sampler`` of a DataLoader.

    Each example is in one block, and each block on one rank. Blocks depend on the number of ranks only if ``blocks``
    does. Ranks may have different numbers of blocks, so an evaluation must not communicate before its end, except with
    ``even``.

    Args:
        dataset_len: number of examples.
        batch_size: examples of a block, at most.
        blocks: number of blocks, at least. By default the smallest number that ``batch_size`` allows.
        even: give every rank the same number of batches; the last may be empty. Use it if the model's forward
            pass is a collective.
        rank, world_size: this process's place; by default the process group's at the first iteration.
        group: the ranks that take different data, as in `GlobalBatchSampler`.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: an argument is out of range, or ``group`` is a mesh of several axes.
    """

    def __init__(
        self,
        dataset_len: int,
        batch_size: int,
        *,
        blocks: int | None = None,
        even: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        group: GroupOrAxis = None,
    ) -> None:
        self.dataset_len = whole_number("dataset_len", dataset_len)
        check_not_empty(self.dataset_len)
        self._batch_size = whole_number("batch_size", batch_size)
        if self._batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._least = 1 if blocks is None else whole_number("blocks", blocks)
        if self._least < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        self._is_even = even
        self._group = process_group(group)
        self._given = checked_place(rank, world_size, self._group)
        self.yields_arrays = False  # the kit's DataLoader sets it for a dataset that reads whole batches

    @property
    def num_blocks(self) -> int:
        """The number of blocks, over all ranks."""
        return max(self._least, -(-self.dataset_len // self._batch_size))

    @property
    def own_blocks(self) -> range:
        """The numbers of this rank's blocks."""
        rank, world_size = self._given or place(self._group)
        return range(*shard(self.num_blocks, rank, world_size))

    def __len__(self) -> int:
        """Return the number of this rank's batches."""
        if not self._is_even:
            return len(self.own_blocks)
        _, world_size = self._given or place(self._group)
        return -(-self.num_blocks // world_size)

    def __iter__(self) -> Iterator[Indices]:
        blocks = eval_batches(self.dataset_len, self._batch_size, self.num_blocks)
        own = [blocks[number] for number in self.own_blocks]
        empty = [np.empty(0, np.int64)] * (len(self) - len(own))
        make = index_array if self.yields_arrays else index_list
        return (make(block, 0) for block in own + empty)


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an int; NumPy's integers are taken. Raises TypeError for anything else, and for a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r:.60}")
    return index(value)


def check_not_empty(dataset_len: int) -> None:
    """Raise ValueError if a dataset has no example."""
    if dataset_len < 1:
        raise ValueError(f"the dataset is empty: dataset_len is {dataset_len}")


def checked_place(rank: int | None, world_size: int | None, group: Group) -> Place | None:
    """Return the place that a caller gave, or None for the process group's.

    Args:
        rank: as the caller gave it, or None.
        world_size: as the caller gave it, or None.
        group: the group, which has a place of its own.

    Raises:
        TypeError, ValueError: the arguments do not go together, or are out of range.
    """
    if rank is None and world_size is None:
        return None
    if group is not None:
        raise ValueError("group is given, and rank and world_size too: pass the group alone, or the other two")
    if rank is None or world_size is None:
        raise ValueError(f"rank is {rank} and world_size is {world_size}: pass both, or neither")
    given = Place(whole_number("rank", rank), whole_number("world_size", world_size))
    shard(0, *given)
    return given


def _slicer(begin: int, end: int) -> Any:
    """Return a function that takes the rows [begin, end) of a tensor, and returns other values as they are."""

    def rows_of(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0
        return value[begin:end] if has_rows else value

    return rows_of


def seed_generators(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch's generators with an integer of 64 bits.

    `torch.manual_seed` asks every kind of device, which takes 0.3 ms on a CPU build. NumPy takes 32 bits quickly.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # datasets use the global generator
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
