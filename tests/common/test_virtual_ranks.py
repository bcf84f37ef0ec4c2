"""Test that runs with --virtual-ranks have the same bits at any world size, even if it changes at each resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import Harness, Shape, recorded

pytestmark = pytest.mark.virtual_ranks


OPTIONS = ("--virtual-ranks=4", "--straggler=0")  # a report of a slow rank would change metrics.jsonl


def check_same_bits(result: dict[str, Any], reference: dict[str, Any]) -> None:
    """Check that weights, metrics.jsonl and the last checkpoint, with the optimizer's state, have the same bits."""
    run_dir = Path(result["run_dir"])
    expected = Path(reference["run_dir"])
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert recorded(run_dir) == recorded(expected)
    last = f"checkpoints/step-{reference['steps']:08d}"
    files = {file.name for file in (expected / last).glob("*.safetensors")}
    assert "optimizer.safetensors" in files
    for name in files:
        assert (run_dir / last / name).read_bytes() == (expected / last / name).read_bytes(), name


def relay(harness: Harness, options: list[str], kills: list[tuple[int, int]], last: int, run_dir: Path) -> Any:
    """Run n ranks and kill them after a step, for each (n, step) of ``kills``. Then run ``last`` ranks to the end."""
    for n, step in kills:
        job = harness.start(n, *options, run_dir=run_dir)
        job.wait_for_step(step)
        harness.kill_all()
        job.process.communicate()
    return harness.train(last, *options, run_dir=run_dir)


@pytest.mark.kills
def test_three_ranks_are_killed_and_two_end_with_the_bits_of_one(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    reference = undisturbed(1, *OPTIONS)
    kill = Shape.of(reference).epoch + Shape.of(reference).every + 1
    result = relay(harness, [*harness.app.small, *OPTIONS], [(3, kill)], 2, harness.folder / "run")
    assert 0 < result["resumed_from_step"] < result["steps"]
    check_same_bits(result, reference)


@pytest.mark.soak  # the quick tests run test_three_ranks_are_killed_and_two_end_with_the_bits_of_one
@pytest.mark.parametrize("variant", [0, 1])
def test_the_weights_have_one_hash_at_any_number_of_ranks(harness: Harness, variant: int, table: list[str]) -> None:
    """Train a variant of the app for at most 320 steps at each world size, and compare the runs."""
    counts = [n for n in (1, 2, 3, 4, 5, 8) if n <= (harness.app.virtual_ranks or 0)]
    options = [f"--dataset={harness.app.dataset}", "--max-steps=320", "--log-every=5", *harness.app.variants[variant]]
    options += ["--virtual-ranks=8", "--straggler=0"]
    reference, *results = (harness.train(n, *options, run_dir=harness.folder / str(n)) for n in counts)
    for result in results:
        check_same_bits(result, reference)
    ranks = ", ".join(map(str, counts))
    runs = len(counts)
    words = " ".join(harness.app.variants[variant])
    event = f"one hash after {reference['steps']} steps, {words}"
    table.append(f"| {harness.app.name} | {ranks} | none: {event} | {runs} | {runs} |")


@pytest.mark.soak  # the quick tests run test_three_ranks_are_killed_and_two_end_with_the_bits_of_one
def test_four_three_one_and_two_ranks_in_turn_end_with_the_bits_of_one(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, table: list[str]
) -> None:
    reference = undisturbed(1, *OPTIONS)
    shape = Shape.of(reference)
    chance = random.Random(38)
    runs = amount(soak, few=1, many=harness.app.kills)
    for i in range(runs):
        steps = sorted(chance.sample(range(1, reference["steps"] - shape.every - 1), 3))
        kills = list(zip((4, 3, 1), steps))
        result = relay(harness, [*harness.app.small, *OPTIONS], kills, 2, harness.folder / str(i))
        check_same_bits(result, reference)
    table.append(f"| {harness.app.name} | 4, 3, 1, 2 | SIGKILL of all, and another number of ranks | {runs} | {runs} |")
