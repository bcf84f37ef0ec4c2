"""Test learning rate schedules, which are functions of the step, so that a resume needs no state."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from samestep import schedules

STEPS = 200
HORIZON: dict[str, Callable[[int, int], float]] = {
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "one_cycle": schedules.one_cycle,
}


@pytest.mark.parametrize("name", HORIZON)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, STEPS])
def test_a_factor_is_above_0_up_to_1_and_stays_where_the_schedule_ended(name: str, steps: int) -> None:
    schedule = HORIZON[name]
    factors = [schedule(step, steps) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert schedule(steps + 1, steps) == schedule(steps, steps)
    assert schedule(10 * steps, steps) == schedule(steps, steps)
    # The results are equal bit for bit in any order of calls, as in a run that resumes from a checkpoint.
    assert [schedule(step, steps) for step in reversed(range(steps))] == factors[::-1]


def test_linear_and_cosine_by_their_values() -> None:
    assert [schedules.linear(step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [schedules.linear(step, 4, final=0.5) for step in range(5)] == [1.0, 0.875, 0.75, 0.625, 0.5]
    half = math.sqrt(0.5)
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0]
    assert [schedules.cosine(step, 4) for step in range(5)] == pytest.approx(expected, abs=1e-15)
    assert schedules.cosine(4, 4, final=0.1) == 0.1
    assert schedules.constant(10**9) == 1.0


def test_warm_up_makes_no_update_of_nothing_and_ends_at_1() -> None:
    assert [schedules.warmup(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert schedules.warmup(0, 0) == 1.0


def test_step_decay_counts_the_milestones_that_are_reached() -> None:
    assert [schedules.step_decay(step, (2, 4), 0.5) for step in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert schedules.step_decay(100, ()) == 1.0


def test_one_cycle_rises_to_1_and_falls_to_its_end() -> None:
    factors = [schedules.one_cycle(step, STEPS) for step in range(STEPS)]
    top = factors.index(max(factors))
    assert (factors[0], top, factors[top]) == (1 / 25, 0.3 * STEPS - 1, 1.0)
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[-1] == pytest.approx(1 / 250_000, rel=1e-9)
