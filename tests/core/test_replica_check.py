"""Test that a watchdog raises errors if ranks differ, or if a loss is NaN or infinite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from samestep import NonRetryableError, RetryableError, checkpoint, checksums
from samestep.env import World
from samestep.options import Options
from samestep.recovery.replica_check import minority_ranks
from samestep.recovery.watchdog import Watchdog
from samestep.replicas import Replicas


def start(run_dir: Path, rank: int = 0, restarts: int = 0) -> Watchdog:
    """Return the started watchdog of one of 3 ranks."""
    (run_dir / "log").mkdir(exist_ok=True)
    watchdog = Watchdog()
    watchdog.start(World(rank, 3, restart_count=restarts), Options(timeout=60.0, run_dir=run_dir, lr=0.5))
    return watchdog


@pytest.mark.parametrize(
    ("rows", "ranks", "is_known"),
    [
        ([7, 5], "ranks 0 and 1 differ", False),
        ([5, 5, 7], "rank 2 differs from all others", True),
        ([5, 6, 7], "the 3 ranks differ", False),
        ([5, 5, 7, 7], "the 4 ranks differ", False),
        ([7, 5, 5, 6, 5], "ranks [0, 3] differ from all others", True),
    ],
)
def test_ranks_outside_the_majority_are_named(rows: list[int], ranks: str, is_known: bool) -> None:
    text, unknown = minority_ranks(np.array(rows)[:, None])
    assert (text, unknown == "") == (ranks, is_known)


def gathered(rows: list[list[int]]) -> Callable[[Any], Any]:
    """Return a fake all-gather, which always returns these rows."""
    return lambda row: np.array(rows)


def test_equal_replicas_pass(tmp_path: Path) -> None:
    start(tmp_path).check_replicas(gathered([[1, 2]] * 3), {"model": {"a": 1, "b": 2}}, 8)
    start(tmp_path).check_final_weights(SimpleNamespace(all_gather=gathered([[5]] * 3)), "ab" * 32, tmp_path)


@pytest.mark.parametrize("differs", [False, True])
def test_rank_0_compares_what_it_writes(tmp_path: Path, differs: bool) -> None:
    """A bit of an array flips while the ranks compare their arrays. Then the ranks differ, and nothing is saved.

    Rank 0 also compares the frozen arrays, which it does not write.
    """
    weights = np.zeros(2)

    def check_replicas(all_gather: Any, own: Any, step: int) -> None:
        weights[0] = 1.0
        assert own == checksums.of_groups({"model": {"w": np.zeros(2)}, "frozen": {"base": np.ones(2)}})
        if differs:
            raise RetryableError("rank 1 differs")

    run = SimpleNamespace(
        monitor=SimpleNamespace(check_replicas=check_replicas),
        collectives=SimpleNamespace(all_gather=None),
        options=SimpleNamespace(run_dir=tmp_path),
        metrics=SimpleNamespace(sync=lambda: None),
        parts=SimpleNamespace(frozen=lambda: {"base": np.ones(2)}),
        state_to_save=lambda: ({}, {}, 3),
        app="toy",
        step=8,
    )
    with contextlib.suppress(RetryableError):
        Replicas().save(run, {"model": {"w": weights}})
    checkpoint.finish()
    saved = [checkpoint.read(folder).arrays("model")["w"].tolist() for folder in checkpoint.folders(tmp_path)]
    assert saved == ([] if differs else [[0.0, 0.0]])


def test_the_first_array_that_differs_decides(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [1, 2, 9], [1, 7, 3]]
    own = {"model": dict.fromkeys("abc", 0)}
    with pytest.raises(
        RetryableError, match=r"^rank 2 differs from all others at step 8, first in model b: not saved; "
    ):
        start(tmp_path).check_replicas(gathered(rows), own, 8)
    collectives = SimpleNamespace(all_gather=gathered(rows), broadcast=lambda content: content)
    with pytest.raises(RetryableError, match=r"^the 3 ranks differ in the final weights: no result, and without "):
        start(tmp_path).check_final_weights(collectives, "ab" * 32, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_retried_once_per_step(tmp_path: Path, value: float) -> None:
    text = f"^at step 8 the test loss is {value}: lower --lr, now 0.5"
    losses = {"loss": 1.0, "test loss": value}
    start(tmp_path).check_losses({"loss": 1.0}, 8)
    for rank in range(3):  # failures of other ranks in the same start do not count
        with pytest.raises(RetryableError, match=f"{text}, unless a flipped bit"):
            start(tmp_path, rank).check_losses(losses, 8)
    with pytest.raises(RetryableError):
        start(tmp_path, restarts=1).check_losses(losses, 7)
    with pytest.raises(NonRetryableError, match=r"^at step 7 .* in an earlier start$"):
        start(tmp_path, restarts=2).check_losses(losses, 7)


@pytest.mark.parametrize("content", ["", "8 0", "[]", "{}", '{"step": 8}'])
def test_a_damaged_note_costs_one_more_start(tmp_path: Path, content: str) -> None:
    watchdog = start(tmp_path, restarts=1)
    (tmp_path / "log" / "not-finite").write_text(content)
    with pytest.raises(RetryableError):
        watchdog.check_losses({"loss": math.nan}, 8)
