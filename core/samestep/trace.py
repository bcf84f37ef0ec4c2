"""Digest weights and gradients (--trace-every K), and write and read ``log/trace.jsonl``.

A line is of every K-th step: its number, a digest of each weight at its start, and one of each gradient, as 16
hexadecimal digits. Rank 0 writes the file. The digests of all shards of an array add up to the digest of the whole
array, which does not depend on the number of ranks.

A sharded model has no second copy of a weight. Its digests are also compared over time: nothing may change a weight
between two updates, so a change is a flipped bit.
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

NAME = "log/trace.jsonl"  # in a run dir
Digests = Mapping[str, int]  # 64 bits by a tensor's name
_ROWS = 1  # salts of keys
_COLUMNS = 2
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_DIGESTS = untrusted.mapping(untrusted.text(16), size=10**6)
_SCHEMA = {"step": untrusted.integer(1, 2**62), "weights": _DIGESTS, "gradients": _DIGESTS}


class Record(NamedTuple):
    """The digests of a step, counted from 1: of the weights at its start, and of their gradients."""

    step: int
    weights: Digests
    gradients: Digests


# --- digests ---------------------------------------------------------------------------------------------------------


def digest(values: NDArray[Any], offset: Sequence[int] = (), shape: Sequence[int] | None = None) -> int:
    """Return 64 bits that depend on each bit of an array and on its place, but not on the array's dtype.

    It is a sum modulo 2**64 of the array's words of at most 32 bits, each times an odd key of its row and an odd key of
    its column. So a single word that differs always changes it. The digests of the parts of an array add up to the
    digest of the whole.

    Args:
        values: the array, or a part of it.
        offset: where the part begins in the whole array.
        shape: of the whole array.
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
    """Return the odd keys of the places [first, end), which SplitMix64 makes."""
    places = np.arange(first, end, dtype=np.uint64) + np.uint64(salt << 48)
    mixed: NDArray[np.uint64] = splitmix64(places * np.uint64(0x9E3779B97F4A7C15))
    return mixed | np.uint64(1)


@functools.lru_cache(maxsize=256)
def _column_keys(
    offset: tuple[int, ...], part: tuple[int, ...], whole: tuple[int, ...], words: int
) -> NDArray[np.uint64]:
    """Return the key of each word of a row: of ``words`` for each of its elements.

    Args:
        offset: where the part begins, without the rows.
        part: its shape, without the rows.
        whole: shape of the whole array, without the rows.
        words: number of words of an element.
    """
    slices = tuple(slice(begin, begin + length) for begin, length in zip(offset, part))
    keys = _keys(_COLUMNS, 0, math.prod(whole) * words).reshape(*whole, words)
    return np.ascontiguousarray(keys[slices]).reshape(-1)


# --- a rank's part ---------------------------------------------------------------------------------------------------


class Trace:
    """Take the digests of this rank's weights and gradients around the updates of an optimizer.

    The function ``watch`` of an app's `samestep.parts.Parts` sets the first three attributes, and arranges the calls
    of `begin_update` and `end_update`.

    Attributes:
        weights: returns the digests of the weights, or of this rank's shards.
        gradients: returns the digests of their gradients, which are 0 for a weight without one.
        copies: names of the shards that an earlier rank holds too.
    """

    weights: Callable[[], Digests]
    gradients: Callable[[], Digests]
    copies: frozenset[str] = frozenset()

    def __init__(self, every: int, step: int, *, rank: int = 0, is_sharded: bool = False) -> None:
        """Begin at ``step`` updates.

        Args:
            every: steps from one record to the next.
            step: number of updates done.
            rank: this rank.
            is_sharded: each rank has shards, which are compared between updates.
        """
        self.is_sharded = is_sharded
        self._every = every
        self._step = step
        self._rank = rank
        self._before: Digests = {}  # weights at the start of this step
        self._gradients: Digests = {}
        self._after: Digests = {}  # weights after the last update that was traced
        self._records: list[Record] = []

    @property
    def _is_due(self) -> bool:
        return (self._step + 1) % self._every == 0

    def begin_update(self) -> None:
        """Take the weights before the first update of a step. Raises as `check`."""
        is_taken = bool(self._before)
        if is_taken or not (self._is_due or self._after):
            return
        weights = self.weights()
        self._compare(weights)
        self._after = {}
        if self._is_due:
            self._before = weights

    def end_update(self) -> None:
        """Take the gradients, which a closure or a wrapper of the optimizer may compute within its update."""
        if not self._is_due:
            return
        self._gradients = self.gradients()
        if self.is_sharded:
            self._after = self.weights()

    def count_step(self, step: int) -> None:
        """Begin the step after ``step`` updates."""
        if self._before:
            self._records.append(Record(step, self._before, self._gradients))
        self._before = {}
        self._gradients = {}
        self._step = step

    def check(self) -> None:
        """Compare the shards with those after the last update, if it was traced, such as before a checkpoint.

        Raises:
            RetryableError: a shard has changed since.
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
        """Return the records since the last call. If the model is sharded, it is collective.

        Args:
            all_gather: as `samestep.parts.Collectives.all_gather`.
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
        """Return the digests in the order of names, with 0 for a shard that an earlier rank adds."""
        return [0 if name in self.copies else value for name, value in digests.items()]


# --- the file --------------------------------------------------------------------------------------------------------


class TraceFile:
    """Append to ``log/trace.jsonl``, which a run without --trace-every does not make.

    Opening it cuts it back to ``resumed_from`` updates, as metrics.jsonl is, so that each step appears once.
    """

    def __init__(self, run_dir: Path, resumed_from: int | None) -> None:
        """Cut back the file, if there is one. Raises OSError if it cannot be written.

        Args:
            run_dir: the run's folder.
            resumed_from: number of updates to keep; None for a new run.
        """
        self._root = Root(run_dir)
        self._path = run_dir / NAME
        self._file: IO[bytes] | None = None
        if self._path.exists():
            length = length_until(untrusted.read_bytes(self._path), resumed_from or 0)
            self._file = self._root.append(NAME)
            self._file.truncate(length)

    def write(self, records: Iterable[Record]) -> None:
        """Append records, in order. Raises NonRetryableError if the disk is full."""
        content = b"".join(_encode(record) for record in records)
        if not content:
            return
        with checkpoint.writing(self._path):
            if self._file is None:
                self._file = self._root.append(NAME)
            write_all(self._file.fileno(), content)

    def sync(self) -> None:
        """Make the lines survive a crash of the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())


def _encode(record: Record) -> bytes:
    values = {"step": record.step, "weights": _texts(record.weights), "gradients": _texts(record.gradients)}
    return json.dumps(values).encode() + b"\n"


def _texts(digests: Digests) -> dict[str, str]:
    return {name: f"{value:016x}" for name, value in digests.items()}


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line; None if it is of another form, such as one that a crash cut off."""
    try:
        values = untrusted.parse_object(line)
        untrusted.check(values, _SCHEMA)
    except ValueError:
        return None
    return values


def length_until(content: bytes, last_step: int) -> int:
    """Return the length of the lines, from the first on, that are of rising steps from 1 to ``last_step``.

    Args:
        content: of the file.
        last_step: the largest step to count.
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
    """Return the digests of a run by step, kind ("weights" or "gradients") and name, as in the file.

    Lines of another form are left out. Raises OSError if the file cannot be read.
    """
    try:
        content = untrusted.read_bytes(run_dir / NAME)
    except FileNotFoundError:
        return {}
    found = {}
    for values in filter(None, map(_parse, content.splitlines())):
        found[values["step"]] = {kind: values[kind] for kind in ("weights", "gradients")}
    return found
