"""Test the rule that reports a straggler, with made-up times of each phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from samestep import log
from samestep.recovery.straggler import StragglerDetector, leave_one_out_median
from samestep.step_timer import PHASES

BASE = {"input": 0.001, "computing": 0.010, "waiting": 0.005, "optimizer": 0.001}


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "warning", found.append)
    return found


def named(
    detector: StragglerDetector,
    world_size: int,
    syncs: Iterable[int],
    more: Callable[[int, int], dict[str, float]],
    begin: int = 0,
) -> list[tuple[int, int, str]]:
    """Return the reports as (step, rank, phase); ranks spend ``more(rank, step)`` seconds in addition to BASE."""
    found = []
    before = begin
    for step in syncs:
        slots = np.zeros((world_size, len(PHASES)))
        for each in range(before, step):
            for rank in range(world_size):
                slots[rank] += [BASE[phase] + more(rank, each).get(phase, 0.0) for phase in PHASES]
        found += [(step, one["rank"], one["phase"]) for one in detector.update(step, slots.reshape(-1).tolist())]
        before = step
    return found


def every(log_every: int, last: int = 300) -> list[int]:
    return [1, *range(log_every if log_every > 1 else 2, last + 1, log_every)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
@pytest.mark.parametrize("phase", ["input", "computing", "optimizer"])
@pytest.mark.parametrize("log_every", [1, 3, 10, 50, 100])
def test_a_slow_rank_is_named_once_with_its_phase(world_size: int, phase: str, log_every: int) -> None:
    detector = StragglerDetector(1.5, world_size, 36 * world_size, 0)
    slow = world_size - 1
    ((step, rank, named_phase),) = named(
        detector, world_size, every(log_every), lambda rank, step: {phase: 0.2} if rank == slow and step >= 99 else {}
    )
    assert (rank, named_phase) == (slow, phase)
    assert 99 < step <= max(99 + 50 + 10, 200)  # 50 slow steps, and the window of 10 in which the rank became slow
    assert named(detector, world_size, every(10), lambda rank, step: {}, begin=0) == []


def test_the_warning_states_the_seconds_of_the_other_ranks(lines: list[str]) -> None:
    detector = StragglerDetector(1.5, 3, 60, 100)
    syncs = [101, *range(110, 200, 10)]
    found = named(detector, 3, syncs, lambda rank, step: {"input": 0.21} if rank == 1 else {}, 100)
    assert found == [(160, 1, "input")]
    assert lines == [
        "rank 1 is a straggler: 0.211 s per step in input, the others 0.001 (over 59 steps to step 160); reported once"
    ]


def test_the_warning_names_ranks_that_share_processors(lines: list[str]) -> None:
    detector = StragglerDetector(1.5, 2, 60, 0, "3 ranks share 2 processors")
    named(detector, 2, every(10), lambda rank, step: {"input": 0.21 * rank})
    (line,) = lines
    assert line.endswith("(3 ranks share 2 processors, over 59 steps to step 60); reported once")


def test_two_slow_ranks_of_five_are_both_named() -> None:
    slow = {1: {"input": 0.1}, 4: {"optimizer": 0.3}}
    found = named(StragglerDetector(1.5, 5, 60, 0), 5, every(10), lambda rank, step: slow.get(rank, {}))
    assert found == [(60, 1, "input"), (60, 4, "optimizer")]


def test_of_two_ranks_that_are_both_slow_none_is() -> None:
    assert named(StragglerDetector(1.5, 2, 60, 0), 2, every(10), lambda rank, step: {"input": 0.2}) == []


@pytest.mark.parametrize(
    ("factor", "extra", "expected"),
    [(1.5, 0.005, False), (1.5, 0.008, True), (2.5, 0.008, False), (2.5, 0.020, True), (1.0, 0.0015, False)],
)
def test_the_factor_is_of_what_a_rank_does_not_wait_for(factor: float, extra: float, expected: bool) -> None:
    """A rank works 12 ms and waits 5 ms per step. With the factor 1, a delay counts from a tenth of the step."""
    detector = StragglerDetector(factor, 2, 60, 0)
    assert bool(named(detector, 2, every(10, 2000), lambda rank, step: {"computing": extra * rank})) == expected


@pytest.mark.parametrize(
    "is_slow",
    [
        lambda rank, step: rank and 100 <= step < 139,
        lambda rank, step: rank and step % 25 == 0,
        lambda rank, step: (step // 10) % 2 == rank,
    ],
)
def test_a_rank_is_to_be_slow_in_each_part_of_fifty_steps(is_slow: Callable[[int, int], bool]) -> None:
    """Other work on a machine comes in bursts, so a straggler must be slow in consecutive windows."""
    detector = StragglerDetector(1.5, 2, 60, 0)
    slow = {"computing": 5.0}
    assert not named(detector, 2, every(10), lambda rank, step: slow if is_slow(rank, step) else {})


def test_a_delay_of_less_than_a_second_in_all_is_not_reported_yet() -> None:
    """Rank 1 works 22 ms per step, and the other rank 12 ms."""
    detector = StragglerDetector(1.5, 2, 60, 0)
    ((step, rank, phase),) = named(detector, 2, every(10), lambda rank, step: {"input": 0.01 * rank})
    assert (rank, phase) == (1, "input")
    assert 100 <= step <= 110


def test_the_first_step_does_not_count() -> None:
    """The first step allocates and compiles, so it may be slow on one rank."""
    detector = StragglerDetector(1.5, 2, 60, 0)
    syncs = [1, *range(100, 400, 100)]
    assert not named(detector, 2, syncs, lambda rank, step: {"computing": 9.0 * rank * (not step)})


def test_one_sample_more_is_no_slowness() -> None:
    """Rank 0 of 3 has two samples of a global batch of 4, and the other ranks have one each."""
    double: dict[str, Any] = {"computing": 0.011, "input": 0.001}
    assert not named(StragglerDetector(1.5, 3, 4, 0), 3, every(10, 1000), lambda rank, step: {} if rank else double)
    assert named(StragglerDetector(1.5, 3, 400, 0), 3, every(10, 1000), lambda rank, step: {} if rank else double)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
def test_leave_one_out_median_is_numpys_median_of_the_others(world_size: int) -> None:
    random = np.random.default_rng(world_size)
    for values in (random.random(world_size), np.ones(world_size), random.integers(0, 3, world_size).astype(float)):
        expected = [np.median(np.delete(values, rank)) for rank in range(world_size)]
        assert np.allclose(leave_one_out_median(values), expected)
