"""Divide a dataset into global batches that are the same at any world size, and into blocks for an evaluation."""

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
from torch.utils.data import Sampler

from samestep.sharding import GlobalBatches, eval_batches, shard, step_seed
from samestep.torch import losses
from samestep.torch.batch_rows import rows_of
from samestep.torch.ranks import RANK_ARGUMENTS, Group, GroupOrAxis, Place, has_group, place, process_group

Batch = TypeVar("Batch")


class IndexList(list[int]):
    """The indices of a batch's examples, and the batch's ``epoch``."""

    epoch = 0


class IndexArray(np.ndarray[Any, np.dtype[np.int64]]):
    """The indices of a batch's examples, int64 [m], and the batch's ``epoch``."""

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
        step: number of updates done before this batch.
        first: index of this rank's first row.
        local: number of this rank's rows, which may be 0.
        size: number of rows of the global batch, over all ranks.
    """

    step: int
    first: int
    local: int
    size: int


class HasRows(Protocol):
    """An object that returns the rows of the current batch, such as a `GlobalBatchSampler` or a `FixedRows`."""

    def rows(self) -> Rows:
        """Return the rows of the current batch."""


class FixedRows:
    """Rows that a program sets itself before each forward pass.

    Use this class for `exact` if batches do not come from a `GlobalBatchSampler`. Before each forward pass, seed
    torch's CPU generator with the same number on all ranks, for example with `samestep.sharding.step_seed`. Dropout
    draws its masks from this generator.

    Args:
        virtual_ranks: None, or any number. With a number, batch norms compute the statistics of each forward pass
            without other ranks. With None, the statistics are over all ranks' rows.
        group: the ranks that get different data, as in `GlobalBatchSampler`.
    """

    def __init__(self, virtual_ranks: int | None = None, group: GroupOrAxis = None) -> None:
        self.virtual_ranks = virtual_ranks
        self.group = process_group(group)
        self._rows: Rows | None = None

    def set(self, step: int, first: int, local: int, size: int) -> None:
        """Set the rows of the next forward pass.

        Args:
            step: number of updates done before this batch.
            first: index of this rank's first row in the global batch.
            local: number of this rank's rows.
            size: number of rows of the global batch, over all ranks.

        Raises:
            ValueError: the rows are not part of the global batch.
        """
        if first < 0 or local < 0 or first + local > size:
            raise ValueError(f"rows {first} to {first + local} are not part of a global batch of {size} rows")
        self._rows = Rows(step, first, local, size)

    def rows(self) -> Rows:
        """Return the rows of the current batch.

        Raises:
            RuntimeError: the program has not called `set`.
        """
        if self._rows is None:
            raise RuntimeError("FixedRows has no rows yet: call set(step, first, local, size) before the forward pass")
        return self._rows


class GlobalBatchSampler(Sampler[Indices]):
    """Yield this rank's shard of each global batch, for the argument ``batch_sampler`` of a DataLoader.

    An epoch is a permutation of the dataset, which is computed and never stored. The shards of a batch differ in size
    by at most one, and may be empty. Each batch is one step of the optimizer. The sampler's position is the number of
    steps done, over all epochs. An iteration begins at the position, and stops at the end of its epoch. After an
    epoch's last batch, the position belongs to this epoch until the iteration ends. If a program is restored at such a
    position, the next iteration yields no batch, so that the program first repeats its evaluation.

    `samestep.torch.DataLoader` counts the batches that the loop has received. With any other DataLoader, iterate over
    ``sampler.received(loader)``, because its workers may read ahead.

    Args:
        dataset_len: number of examples.
        global_batch_size: examples per step, over all ranks.
        rank: rank of this process; by default the rank in the process group at the start of each iteration.
        world_size: number of ranks; by default the number in the process group at the start of each iteration.
        seed: integer in [0, 2**64). The order of examples and the random numbers of `Seeded` depend on this seed.
        drop_last: whether to omit an epoch's last batch if it is smaller.
        seed_steps: whether to seed ``random``, ``numpy.random`` and torch from (seed, step) when the loop receives a
            batch. All ranks use the same seed.
        virtual_ranks: number of sub-shards per global batch, or None. Sums over sub-shards have the same bits at any
            world size; see `samestep.torch.reduction.gradient_tree`.
        accumulate: number of micro-batches per step. With this argument or ``virtual_ranks``, iterate over
            `micro_batches` in each step.
        group: the ranks that get different data: a process group, or an axis of a device mesh, such as ``mesh["dp"]``.
            None means all ranks.

    Raises:
        TypeError: an argument is not an integer.
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
        # Some frameworks create samplers before the process group. `__iter__` then sets the rank and the world size.
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
        self.yields_arrays = False  # set by `samestep.torch.DataLoader` if the dataset reads batches
        self._epoch = 0
        self._batch = 0  # steps done in this epoch; equal to len(self) at the epoch's end
        self._is_drawn = False
        self._is_counted = False
        self._has_received_last = False  # whether the loop has received the epoch's last batch in this process
        # (k, count) and the rows of the micro-batch that `micro_batches` yields. `GradientTree.add` needs (k, count).
        self.micro_batch: tuple[int, int] | None = None
        self._micro_rows: Rows | None = None

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self.batches.steps_per_epoch

    @property
    def seed(self) -> int:
        """The seed of the order of examples."""
        return self.batches.seed

    @property
    def virtual_ranks(self) -> int | None:
        """The number of sub-shards per global batch, or None."""
        return self.batches.virtual_ranks

    @property
    def accumulate(self) -> int:
        """The largest number of micro-batches per step without virtual ranks."""
        return self.batches.accumulate

    @property
    def sampler(self) -> GlobalBatchSampler:
        """This object, because Lightning calls `set_epoch` only on ``loader.batch_sampler.sampler``."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0. The epoch changes when an iteration ends."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of steps done in this epoch. After a resume, use ``enumerate(loader, sampler.batch)``."""
        return self._batch

    @property
    def step(self) -> int:
        """The number of steps done, over all epochs."""
        return self._epoch * len(self) + self._batch

    def seek(self, step: int) -> None:
        """Set the position to ``step`` steps over all epochs."""
        self._go_to(*divmod(whole_number("step", step), len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch, unless it is in this epoch. Only frameworks call this method."""
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    def __iter__(self) -> Iterator[Indices]:
        rank, world_size = self._given or place(self.group, RANK_ARGUMENTS)
        self.batches = replace(self.batches, rank=rank, world_size=world_size)
        return self._indices()

    def _indices(self) -> Iterator[Indices]:
        """Yield the indices of each batch from the position at the first call of next().

        Lightning creates an iterator before it sets the epoch.
        """
        if self._has_received_last:  # the loop left its last iteration after the epoch's last batch
            self._go_to(self._epoch + 1, 0)
        epoch = self._epoch
        for batch in range(self._batch, len(self)):
            self._is_drawn = True
            numbers = self._indices_of(epoch * len(self) + batch)
            yield index_array(numbers, epoch) if self.yields_arrays else index_list(numbers, epoch)

    def _indices_of(self, step: int) -> NDArray[np.int64]:
        """Return the sample indices of all micro-batches of this rank, int64 [m], in order."""
        if not self._is_cut:
            return self.batches.indices(step)
        parts = [self.batches.indices(step, micro_batch) for micro_batch in self.batches.micro_batches(step)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    @property
    def _is_cut(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.batches.virtual_ranks is not None or self.batches.accumulate > 1

    def received(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of ``loader``, and count each batch as received.

        Args:
            loader: a loader that uses this sampler, or a new iteration of such a loader.

        Raises:
            RuntimeError: raised by the first batch if gradients are disabled, as in an evaluation.
        """
        batches = iter(loader)
        self._is_counted = True
        return self._count(batches)

    def _count(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "gradients are disabled, and this iteration would count as training: evaluate with an EvalSampler, or "
                "enable gradients to train"
            )
        epoch: int | None = None
        for batch in batches:
            epoch = self._epoch if epoch is None else epoch  # known at the first batch; see `_indices`
            self._epoch = epoch
            self._batch += 1
            self._has_received_last = self._batch == len(self)
            self._seed_generators()
            yield batch
        self._go_to((self._epoch if epoch is None else epoch) + 1, 0)

    def _go_to(self, epoch: int, batch: int) -> None:
        self._epoch = epoch
        self._batch = batch
        self._has_received_last = False

    def _seed_generators(self) -> None:
        if self.seed_steps:
            seed_generators(step_seed(self.seed, self.step - 1))

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Divide the batch that the loop has received last into this rank's micro-batches.

        While the loop computes a micro-batch, `rows` returns the rows of this micro-batch. This method seeds the
        generators again before each micro-batch, so that dropout masks do not depend on the number of micro-batches.

        Args:
            batch: tensors, arrays and lists of strings or numbers, [rows of this rank, ...], in dicts, lists and
                tuples. See `batch_rows.rows_of`.

        Raises:
            TypeError: the batch has an object of another type.
            ValueError: a tensor or an array has another number of rows.
        """
        step = self._current_step()
        micro_batches = self.batches.micro_batches(step)
        micro_rows = [self._rows_of(step, micro_batch) for micro_batch in micro_batches]
        rows = sum(each.local for each in micro_rows)
        begin = 0
        for micro_batch, own_rows in zip(micro_batches, micro_rows):
            self.micro_batch = micro_batch
            self._micro_rows = own_rows
            end = begin + own_rows.local
            self._seed_generators()
            losses.in_sub_shards = self.virtual_ranks is not None
            try:
                yield rows_of(batch, rows, begin, end)
            finally:
                losses.in_sub_shards = False
                self.micro_batch = None
                self._micro_rows = None
            begin = end

    def rows(self) -> Rows:
        """Return the rows of the batch or micro-batch that the loop has received last.

        Raises:
            RuntimeError: the loop has received no batch, or a step has several micro-batches and the loop does not
                iterate over `micro_batches`.
        """
        if self._micro_rows is not None:
            return self._micro_rows
        step = self._current_step()
        if self._is_cut:
            raise RuntimeError("a step has several micro-batches: iterate over sampler.micro_batches(batch)")
        return self._rows_of(step, (0, 1))

    def _rows_of(self, step: int, micro_batch: tuple[int, int]) -> Rows:
        local = self.batches.local_rows(step, micro_batch)
        return Rows(step, local.start, len(local), self.batches.size(step))

    def _current_step(self) -> int:
        if not self._is_counted or self._batch == 0:
            raise RuntimeError(
                "the loop has not received a batch: use samestep.torch.DataLoader, or sampler.received(loader)"
            )
        return self.step - 1

    def scale(self, loss_sum: Tensor, grad_scale: float | None = None, of: Tensor | float | None = None) -> Tensor:
        """Return a loss with the gradient of the mean over the global batch's losses, without communication.

        Args:
            loss_sum: sum of the losses of this rank's batch or micro-batch, scalar tensor.
            grad_scale: factor of the gradient. The default is 1 with ``virtual_ranks``, else the world size, because
                DDP divides by the world size. Pass 1 if gradients are summed over ranks.
            of: sum of the losses' weights over all ranks and micro-batches of the step, from `global_sum`; for example
                the number of tokens. The default is the number of examples. If ``of`` is 0, ``loss_sum`` must be 0.

        Returns:
            This rank's part of the mean. The parts of all ranks and micro-batches add up to the mean.
        """
        size = self.batches.num_losses(self._current_step()) if of is None else float(of) or 1.0
        if grad_scale is None:
            grad_scale = 1 if self.virtual_ranks else self.batches.world_size
        return losses.with_gradient(loss_sum, loss_sum.detach() / size, slope=grad_scale / size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings that determine the order of examples.

        Call this method after an optimizer step.

        Raises:
            RuntimeError: no batches are counted, because the loop uses neither `samestep.torch.DataLoader` nor
                `received`.
        """
        if self._is_drawn and not self._is_counted:
            raise RuntimeError(
                "batches were drawn, but nothing counts those that the loop received: use samestep.torch.DataLoader, "
                "or iterate over sampler.received(loader)"
            )
        return {"step": self.step, "epoch": self._epoch, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position to a position that `state_dict` returned.

        Raises:
            ValueError: the state belongs to another order of examples.
        """
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

    Each example is in one block, and each block is on one rank. The blocks do not depend on the world size, unless a
    program computes ``blocks`` from the world size. Ranks may have different numbers of blocks. Therefore an evaluation
    without ``even`` must not communicate before its end.

    Args:
        dataset_len: number of examples.
        batch_size: maximum number of examples per block.
        blocks: minimum number of blocks. The default is the smallest number that ``batch_size`` allows.
        even: whether to yield the same number of batches on each rank, some of them empty. Set ``even`` if the model's
            forward pass is a collective.
        rank: rank of this process; by default the rank in the process group.
        world_size: number of ranks; by default the number in the process group.
        group: the ranks that get different data, as in `GlobalBatchSampler`.

    Raises:
        TypeError: an argument is not an integer.
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
        self.yields_arrays = False  # set by `samestep.torch.DataLoader` if the dataset reads batches

    @property
    def num_blocks(self) -> int:
        """The number of blocks, over all ranks."""
        return max(self._least, -(-self.dataset_len // self._batch_size))

    @property
    def own_blocks(self) -> range:
        """The numbers of this rank's blocks."""
        rank, world_size = self._given or place(self._group, RANK_ARGUMENTS)
        return range(*shard(self.num_blocks, rank, world_size))

    def __len__(self) -> int:
        """Return the number of this rank's batches."""
        if not self._is_even:
            return len(self.own_blocks)
        _, world_size = self._given or place(self._group, RANK_ARGUMENTS)
        return -(-self.num_blocks // world_size)

    def __iter__(self) -> Iterator[Indices]:
        blocks = eval_batches(self.dataset_len, self._batch_size, self.num_blocks)
        own = [blocks[number] for number in self.own_blocks]
        empty = [np.empty(0, np.int64)] * (len(self) - len(own))
        make = index_array if self.yields_arrays else index_list
        return (make(block, 0) for block in own + empty)


def whole_number(name: str, value: Any) -> int:
    """Return an int or a NumPy integer as an int.

    Args:
        name: name of the argument, for the error.
        value: the argument.

    Raises:
        TypeError: the value is a bool, or not an integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r:.60}")
    return index(value)


def check_not_empty(dataset_len: int) -> None:
    """Raise ValueError if a dataset has no examples."""
    if dataset_len < 1:
        raise ValueError(f"the dataset is empty: dataset_len is {dataset_len}")


def checked_place(rank: int | None, world_size: int | None, group: Group) -> Place | None:
    """Return the rank and world size from a caller's arguments; None if the process group determines them.

    Args:
        rank: the caller's argument.
        world_size: the caller's argument.
        group: process group. If given, ``rank`` and ``world_size`` must be None.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: the arguments exclude each other, or are out of range.
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


def seed_generators(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch's generators with a 64-bit integer.

    `torch.manual_seed` would also check all types of devices (0.3 ms on a CPU build). NumPy's generator gets the lower
    32 bits, because `numpy.random.seed` rejects larger integers.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # datasets use NumPy's global generator
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
