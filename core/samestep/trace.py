"""Digest weights and gradients (--trace-every K), and write and read ``log/trace.jsonl``.

The file has a line for every K-th step: the step, the digests of the weights before the step, and the digests of the
gradients. A digest has 16 hexadecimal digits. Rank 0 writes the file. The digests of all shards of an array add up to
the digest of the full array, which does not depend on the world size.

Most shards of a sharded model are on one rank only, so the ranks cannot compare them. Instead, each rank compares its
digests after a traced update with its digests before the next update. A difference means that a bit flipped, or that
the program changed a weight.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep import RetryableError, checkpoint, untrusted
from samestep.root import Root, write_all
from samestep.sharding import splitmix64

NAME = "log/trace.jsonl"  # path in a run dir
Digests = Mapping[str, int]  # 64-bit digests by the tensor's name
_ROWS = 1  # salt for the keys of rows
_COLUMNS = 2  # salt for the keys of columns
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_DIGESTS = untrusted.mapping(untrusted.text(16), size=10**6)
_SCHEMA = {"step": untrusted.integer(1, 2**62), "weights": _DIGESTS, "gradients": _DIGESTS}


class Record(NamedTuple):
    """The digests of one step.

    Attributes:
        step: number of the step, from 1.
        weights: digests of the weights before the step.
        gradients: digests of the gradients.
    """

    step: int
    weights: Digests
    gradients: Digests


# --- digests ---------------------------------------------------------------------------------------------------------


def digest(values: NDArray[Any], offset: Sequence[int] = (), shape: Sequence[int] | None = None) -> int:
    """Return a 64-bit digest of the bits of an array and their places.

    The digest is a sum modulo 2**64 over the array's words of at most 32 bits. Each word is multiplied by an odd key of
    its row and an odd key of its column. Therefore a change of a single word always changes the digest. The digests of
    an array's parts add up to the digest of the full array.

    Args:
        values: the array, or a part of it.
        offset: index of the part's first element in the full array; () for the full array.
        shape: shape of the full array; None if ``values`` is the full array.
    """
    if not values.size:
        return 0
    whole = tuple(values.shape if shape is None else shape)
    begin = tuple(offset) or (0,) * values.ndim
    rows = values.shape[0] if values.ndim else 1
    bits = np.ascontiguousarray(values).reshape(rows, -1)
    words = bits.view(_UNSIGNED[min(values.itemsize, 4)])
    columns = _column_keys(begin[1:], values.shape[1:], whole[1:], words.shape[1] // bits.shape[1])
    sums = np.einsum("ij,j->i", words, columns, dtype=np.uint64)
    first = begin[0] if begin else 0
    return int(np.dot(sums, _keys(_ROWS, first, first + rows)))


@functools.lru_cache(maxsize=256)
def _keys(salt: int, first: int, end: int) -> NDArray[np.uint64]:
    """Return odd keys for the places [first, end), uint64 [end - first], by SplitMix64."""
    places = np.arange(first, end, dtype=np.uint64) + np.uint64(salt << 48)
    mixed: NDArray[np.uint64] = splitmix64(places * np.uint64(0x9E3779B97F4A7C15))
    return mixed | np.uint64(1)


@functools.lru_cache(maxsize=256)
def _column_keys(
    offset: tuple[int, ...], part: tuple[int, ...], whole: tuple[int, ...], words: int
) -> NDArray[np.uint64]:
    """Return the keys of a row's words, uint64 [elements of the part's row * words].

    Args:
        offset: index of the part's first element, without the first dimension.
        part: shape of the part, without the first dimension.
        whole: shape of the full array, without the first dimension.
        words: number of words per element.
    """
    slices = tuple(slice(begin, begin + length) for begin, length in zip(offset, part))
    keys = _keys(_COLUMNS, 0, math.prod(whole) * words).reshape(*whole, words)
    return np.ascontiguousarray(keys[slices]).reshape(-1)


# --- a rank's part ---------------------------------------------------------------------------------------------------


class Trace:
    """Collect digests of this rank's weights and gradients at every K-th step.

    The function ``watch`` of an app's `samestep.parts.Parts` sets the attributes, and registers `begin_update` and
    `end_update` as hooks of the optimizer.

    Attributes:
        weights: function that returns the digests of the weights, or of this rank's shards.
        gradients: function that returns the digests of the weights' gradients; 0 for a weight without a gradient.
        copies: names of the shards that a lower rank also holds.
    """

    weights: Callable[[], Digests]
    gradients: Callable[[], Digests]
    copies: frozenset[str] = frozenset()

    def __init__(self, every: int, step: int, *, rank: int = 0, is_sharded: bool = False) -> None:
        """Prepare the trace of a run that has done ``step`` updates.

        Args:
            every: steps from one record to the next.
            step: number of updates done.
            rank: rank of this process.
            is_sharded: whether each rank holds shards. The trace then compares the shards between updates.
        """
        self.is_sharded = is_sharded
        self._every = every
        self._step = step
        self._rank = rank
        self._before: Digests = {}  # digests of the weights before this step
        self._gradients: Digests = {}
        self._after: Digests = {}  # digests of the weights after the last traced update
        self._records: list[Record] = []

    @property
    def _is_due(self) -> bool:
        return (self._step + 1) % self._every == 0

    def begin_update(self) -> None:
        """Digest the weights before a traced step's first update.

        Before the first update after a traced step, also compare the shards with their digests.

        Raises:
            RetryableError: as in `check`.
        """
        is_taken = bool(self._before)
        if is_taken or not (self._is_due or self._after):
            return
        weights = self.weights()
        self._compare(weights)
        self._after = {}
        if self._is_due:
            self._before = weights

    def end_update(self) -> None:
        """Digest the gradients after a traced update, because an optimizer's closure may compute them in the update."""
        if not self._is_due:
            return
        self._gradients = self.gradients()
        if self.is_sharded:
            self._after = self.weights()

    def count_step(self, step: int) -> None:
        """Complete the record of step ``step``, and begin the next step."""
        if self._before:
            self._records.append(Record(step, self._before, self._gradients))
        self._before = {}
        self._gradients = {}
        self._step = step

    def check(self) -> None:
        """Compare the shards with their digests after the last update, if that update was traced.

        Raises:
            RetryableError: a shard has changed since that update.
        """
        if self._after:
            self._compare(self.weights())

    def _compare(self, weights: Digests) -> None:
        changed = [name for name, before in self._after.items() if weights[name] != before]
        if changed:
            shard = f"rank {self._rank}'s shard of {changed[0]}"
            raise RetryableError(
                f"{shard} has changed since the update of step {self._step}, which a flipped bit does: not saved; "
                "a restart resumes from an earlier checkpoint",
                repeated=f"{shard} changes after the update of step {self._step}, which the program does: leave out "
                "--trace-every",
            )

    def take(self, all_gather: Callable[[NDArray[Any]], NDArray[Any]]) -> list[Record]:
        """Return the records since the last call. For a sharded model, the call is a collective.

        Args:
            all_gather: the function `samestep.parts.Collectives.all_gather`.
        """
        records = self._records
        self._records = []
        if not self.is_sharded or not records:
            return records
        names = list(records[0].weights)
        own = [self._owned(record.weights) + self._owned(record.gradients) for record in records]
        table = all_gather(np.array(own, np.uint64).view(np.int64).reshape(-1))  # collective
        sums = table.view(np.uint64).sum(axis=0, dtype=np.uint64).reshape(len(records), 2, len(names)).tolist()
        return [
            Record(record.step, dict(zip(names, weights)), dict(zip(names, gradients)))
            for record, (weights, gradients) in zip(records, sums)
        ]

    def _owned(self, digests: Digests) -> list[int]:
        """Return the digests in order, with 0 for each shard that a lower rank also holds."""
        return [0 if name in self.copies else value for name, value in digests.items()]


# --- the file --------------------------------------------------------------------------------------------------------


class TraceFile:
    """Append to ``log/trace.jsonl``. A run without --trace-every does not create the file.

    Opening the file deletes the lines after step ``resumed_from``, so that each step appears once.
    """

    def __init__(self, run_dir: Path, resumed_from: int | None) -> None:
        """Open the file, if it exists, and delete the lines after step ``resumed_from``.

        Args:
            run_dir: folder of the run.
            resumed_from: last step to keep; None for a new run.

        Raises:
            OSError: the file cannot be read or written.
        """
        self._root = Root(run_dir)
        self._path = run_dir / NAME
        self._file: IO[bytes] | None = None
        if self._path.exists():
            length = length_until(untrusted.read_bytes(self._path), resumed_from or 0)
            self._file = self._root.append(NAME)
            self._file.truncate(length)

    def write(self, records: Iterable[Record]) -> None:
        """Append records, in order.

        Raises:
            NonRetryableError: the write fails, such as on a full disk.
        """
        content = b"".join(_encode(record) for record in records)
        if not content:
            return
        with checkpoint.writing(self._path):
            if self._file is None:
                self._file = self._root.append(NAME)
            write_all(self._file.fileno(), content)

    def sync(self) -> None:
        """Sync the file to the disk, so that its lines survive a crash of the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())


def _encode(record: Record) -> bytes:
    values = {"step": record.step, "weights": _texts(record.weights), "gradients": _texts(record.gradients)}
    return json.dumps(values).encode() + b"\n"


def _texts(digests: Digests) -> dict[str, str]:
    return {name: f"{value:016x}" for name, value in digests.items()}


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line; None if the line is invalid, such as a line that a crash has truncated."""
    try:
        values = untrusted.parse_object(line)
        untrusted.check(values, _SCHEMA)
    except ValueError:
        return None
    return values


def length_until(content: bytes, last_step: int) -> int:
    """Return the length, in bytes, of the leading valid lines whose steps increase and are at most ``last_step``.

    Args:
        content: content of the file.
        last_step: the largest step to include.
    """
    length = 0
    step = 0
    for line in content.splitlines(keepends=True):
        values = _parse(line)
        if values is None or not step < values["step"] <= last_step or not line.endswith(b"\n"):
            break
        step = values["step"]
        length += len(line)
    return length


def read(run_dir: Path) -> dict[int, dict[str, dict[str, str]]]:
    """Return the digests of a run, in hexadecimal, by step, kind ("weights" or "gradients") and tensor name.

    Invalid lines are omitted.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        content = untrusted.read_bytes(run_dir / NAME)
    except FileNotFoundError:
        return {}
    found = {}
    for values in filter(None, map(_parse, content.splitlines())):
        found[values["step"]] = {kind: values[kind] for kind in ("weights", "gradients")}
    return found
