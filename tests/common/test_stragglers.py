"""Test that a run reports its slow rank, and no other rank, with the phase of the step in which it is slow."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import Harness, Outcome, faulty, metrics, options_of

# With these options, steps are much shorter than an app's ``delay``, and few epochs end.
SHORT = ("--global-batch-size=12", "--epochs=100", "--checkpoint-every=0", "--log-every=10")
WITHIN = 50 + 10  # steps: a straggler must be slow for 50 steps, and ranks synchronize every 10


@pytest.fixture(autouse=True)
def _search(harness: Harness) -> None:
    """Skip the tests for an app that searches for no stragglers, because the work of its ranks differs."""
    if not options_of(harness.app.name).parse([]).straggler:
        pytest.skip(f"{harness.app.name} sets --straggler to 0")


def run_slowly(harness: Harness, n: int, name: str, slow: Sequence[tuple[int, str, int, int]], ms: int) -> Outcome:
    """Run a job whose ranks sleep as ``slow`` lists: rank, phase, first step, and the step after the last."""
    fault = {"slow": slow, "seconds": ms / 1000}
    options = [*harness.app.small, *SHORT, f"--max-steps={slow[-1][-1]}"]
    outcome = harness.run(n, *options, run_dir=harness.folder / name, **faulty(fault))
    harness.checked(outcome, n)
    return outcome


def straggler_lines(outcome: Outcome) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if "is a straggler" in line]


def named(run_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return each record of a straggler with the step of its line in metrics.jsonl."""
    return [(line["step"], each) for line in metrics(run_dir) for each in line.get("stragglers", ())]


@pytest.mark.slow
@pytest.mark.stragglers
def test_a_slow_rank_is_named_with_its_phase(harness: Harness) -> None:
    """Some of three ranks are slow in turn, each in another phase."""
    slow = [(rank, phase, 4 + 60 * rank, 64 + 60 * rank) for rank, phase in enumerate(harness.app.slow_phases)]
    outcome = run_slowly(harness, 3, "run", slow, harness.app.delay)
    assert len(straggler_lines(outcome)) == len(slow), outcome
    for line, (step, found), (rank, phase, first, _) in zip(
        straggler_lines(outcome), named(harness.folder / "run"), slow
    ):
        assert (found["rank"], found["phase"]) == (rank, phase)
        assert first + 40 <= step <= first + WITHIN
        assert found["seconds"] > 0.7e-3 * harness.app.delay
        reported = re.match(
            rf"warning: rank {rank} is a straggler: (\S+) s per step in {phase}, .* to step (\d+)\); reported once$",
            line,
        )
        assert reported, line
        assert float(reported[1]) == pytest.approx(found["seconds"], abs=1e-3)
        assert step - 10 < int(reported[2]) <= step  # slow steps make the ranks synchronize between log lines


@pytest.mark.soak  # the quick tests slow down each rank once (test_a_slow_rank_is_named_with_its_phase)
@pytest.mark.slow
def test_a_delay_in_any_phase_is_reported_within_60_steps(harness: Harness, soak: bool, table: list[str]) -> None:
    chance = random.Random(harness.app.name)
    ms = max(200, harness.app.delay)
    runs = amount(soak, few=1, many=harness.app.kills // 2)
    for i in range(runs):
        n = 2 + i % 2
        phase = harness.app.slow_phases[i % len(harness.app.slow_phases)]
        first = chance.randrange(2, 30)
        rank = chance.randrange(n)
        outcome = run_slowly(harness, n, str(i), [(rank, phase, first, first + WITHIN)], ms)
        ((step, found),) = named(harness.folder / str(i))
        assert (found["rank"], found["phase"]) == (rank, phase), outcome
        assert step <= first + WITHIN
        assert len(straggler_lines(outcome)) == 1
    table.append(
        f"| {harness.app.name} | 2, 3 | {ms} ms in a phase of a random rank: named in time | {runs} | {runs} |"
    )


@pytest.mark.soak  # the quick tests cover this with threads (tests/core)
@pytest.mark.slow
def test_nobody_is_named_in_undisturbed_runs(harness: Harness, soak: bool, table: list[str]) -> None:
    runs = amount(soak, few=1, many=5 * harness.app.kills // 2)
    for i in range(runs):
        options = [*harness.app.small, "--epochs=100", "--max-steps=200", "--log-every=10", "--checkpoint-every=50"]
        outcome = harness.run(2 + i % 2, *options, run_dir=harness.folder / str(i))
        harness.checked(outcome, 2 + i % 2)
        assert not straggler_lines(outcome), (i, straggler_lines(outcome))
    table.append(f"| {harness.app.name} | 2, 3 | undisturbed: nobody named | {runs} | {runs} |")
