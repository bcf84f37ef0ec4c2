"""Test the digests of --trace-every, and the file that stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samestep import RetryableError, trace
from samestep.trace import Record, Trace, TraceFile, digest


def array(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(7,), (6, 5), (5, 4, 3)])
def test_digests_of_parts_add_up_to_the_digest_of_the_whole(shape: tuple[int, ...], dtype: str) -> None:
    """The parts are rows, as in FSDP, or columns, as in tensor parallelism."""
    whole = array(*shape, dtype=dtype)
    for axis in range(len(shape)):
        total = 0
        for begin, end in ((0, 2), (2, 2), (2, shape[axis])):
            offset = tuple(begin if each == axis else 0 for each in range(len(shape)))
            part = np.take(whole, range(begin, end), axis)
            total += digest(part, offset, shape=shape)
        assert total % 2**64 == digest(whole)


def test_each_bit_and_each_place_changes_a_digest() -> None:
    values = array(3, 5)
    found = {digest(values)}
    words = values.view(np.uint32).reshape(-1)
    for place in range(len(words)):
        for bit in range(32):
            words[place] ^= np.uint32(1 << bit)
            found.add(digest(values))
            words[place] ^= np.uint32(1 << bit)
    assert len(found) == 1 + 15 * 32
    assert digest(values[[1, 0, 2]]) not in found
    assert digest(values[:, [1, 0, 2, 3, 4]]) not in found
    assert digest(np.array(0, np.float32)) != digest(np.array(-0.0, np.float32))
    assert digest(np.asfortranarray(values)) == digest(values)
    assert digest(array(0, 5)) == 0


def test_file_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    """A resume without --trace-every also truncates the file, and a new run empties it."""
    (tmp_path / "log").mkdir()
    TraceFile(tmp_path, None).write([])
    assert not (tmp_path / trace.NAME).exists()
    records = [Record(step, {"w": step}, {"w": 2**64 - step}) for step in (2, 4, 6)]
    TraceFile(tmp_path, None).write(records)
    with (tmp_path / trace.NAME).open("ab") as file:
        file.write(b'{"step": 8, "weights"')
    assert trace.read(tmp_path)[6] == {"weights": {"w": f"{6:016x}"}, "gradients": {"w": "f" * 15 + "a"}}
    TraceFile(tmp_path, 5).write([Record(6, {"w": 1}, {"w": 1})])
    assert {step: each["weights"]["w"][-1] for step, each in trace.read(tmp_path).items()} == {2: "2", 4: "4", 6: "1"}
    TraceFile(tmp_path, 3)
    assert [*trace.read(tmp_path)] == [2]
    TraceFile(tmp_path, None)
    assert (tmp_path / trace.NAME).read_bytes() == b""


def test_a_sharded_weight_is_compared_between_the_update_that_is_traced_and_the_next() -> None:
    """A save compares the weights, too. A change between two updates without a trace is not detected."""
    weights = {"a": 1, "b": 2}
    traced = Trace(2, 0, rank=3, is_sharded=True)
    traced.weights = lambda: dict(weights)
    traced.gradients = lambda: dict.fromkeys(weights, 7)
    for step in range(1, 5):
        traced.begin_update()
        weights["a"] += 10  # the update
        traced.end_update()
        traced.count_step(step)
        if step == 3:
            weights["b"] += 1
    traced.check()
    weights["b"] += 1
    for check in (traced.check, traced.begin_update):
        with pytest.raises(RetryableError, match=r"rank 3's shard of b has changed since the update of step 4"):
            check()
