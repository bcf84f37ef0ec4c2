"""Test the rows that compare world sizes and evaluations, on recorded events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samestep_check import rows_same_step
from samestep_check.records import Records
from samestep_check.runner import CLOSE, ScriptRunner, Undisturbed
from samestep_check.verdicts import CannotTell, Failed, NotSeen
from test_source import batch, records, step

Events = Sequence[dict[str, Any]]


def loader(number: int = 1, size: int = 9, batches: int = 9) -> dict[str, Any]:
    """Return the event of a loader that begins."""
    return {"event": "iterate", "loader": number, "size": size, "batches": batches}


def read(folder: Path, *ranks: Events) -> Undisturbed:
    """Return an undisturbed run with the events of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    found: Records = records(folder, *ranks)
    return Undisturbed(found, found.steps(), losses=0, warnings=0, duration=1.0)


def runner(folder: Path, ranks: Sequence[Events], single: Events) -> Any:
    """Return a stand-in for the runner, with the runs at several ranks and at one rank."""
    reference = read(folder / "ranks", *ranks)
    alone = read(folder / "single", single)
    found: Any = SimpleNamespace(
        ranks=len(ranks),
        reference=reference,
        twin=reference,
        single=alone,
        steps=reference.steps,
        samples=lambda: [each.indices for each in reference.steps],
        bound=lambda: CLOSE,
    )
    found.require_common_keys = lambda other: ScriptRunner.require_common_keys(found, other)
    return found


def test_repeated_samples_fail_only_if_one_rank_repeats_fewer(tmp_path: Path) -> None:
    """Draw samples with replacement, alike at one rank and at two. Then pad the last batch at two ranks."""
    weights = {"weights": 1.0, "weights_before": 1.0}
    single = [loader(), batch(1, 0, 0, 3), step(1, **weights)]
    two = [loader(), batch(1, 0, 0), step(1, **weights)], [loader(), batch(1, 3), step(1, **weights)]
    assert "no more samples are repeated than at 1 rank" in rows_same_step.odd_batch(runner(tmp_path, two, single))
    padded = [loader(), batch(1, 0, 0), step(1)], [loader(), batch(1, 3, 0), step(1)]
    with pytest.raises(Failed, match="1 samples are repeated in an epoch, to fill the last batch"):
        rows_same_step.odd_batch(runner(tmp_path, padded, single))


def drawn(by_rank: str, *states: int) -> list[dict[str, Any]]:
    """Return the events of three steps, in which a generator has these states and weights differ with ``by_rank``."""
    events = [loader()]
    for number, state in enumerate(states, 1):
        weights = 2.0 if by_rank == "ranks" else 1.0
        events += [batch(number, number), step(number, random={"numpy": state}, weights=weights, weights_before=1.0)]
    return events


def test_random_numbers_of_any_generator_and_rank_explain_other_weights(tmp_path: Path) -> None:
    """Only rank 1, whose batches are empty, draws other numbers than one rank."""
    other = [loader()]
    for number, state in enumerate((9, 8, 7), 1):
        other += [batch(number), step(number, random={"numpy": state})]
    run = runner(tmp_path, (drawn("ranks", 1, 2, 3), other), drawn("single", 1, 2, 3))
    assert "other weights, as steps draw random numbers" in rows_same_step.one_rank(run)
    with pytest.raises(CannotTell, match="steps draw random numbers, and weights at 1 rank differ"):
        rows_same_step.odd_batch(run)
    constant = runner(tmp_path, (drawn("ranks", 1, 1, 1),), drawn("single", 2, 2, 2))
    with pytest.raises(Failed, match="the weights differ by 5e-01 from step 1 on"):
        rows_same_step.one_rank(constant)
    constant.reference = read(tmp_path / "workers", [*drawn("ranks", 1, 1, 1), {"event": "draws"}])
    assert "as steps draw random numbers" in rows_same_step.one_rank(constant)


def test_a_loader_between_steps_draws_no_random_numbers_for_them(tmp_path: Path) -> None:
    """Ranks have other seeds, and an evaluation begins between two steps."""
    begins = {**loader(8), "random": {"numpy": 1}}
    single = drawn("single", 1, 2)
    rank = drawn("ranks", 3, 4)
    for events in (single, rank):
        events.insert(3, begins)
    with pytest.raises(Failed, match="the weights differ by 5e-01 from step 1 on"):
        rows_same_step.one_rank(runner(tmp_path, (rank,), single))


def test_weights_may_differ_by_the_rounding_of_the_lowest_precision(tmp_path: Path) -> None:
    """The weights differ by more than float32's rounding. Then an autocast to bfloat16 is recorded."""
    single = [loader(), batch(1, 0, 1), step(1, weights=1.0)]
    two = [loader(), batch(1, 0), step(1, weights=1.001)], [loader(), batch(1, 1), step(1)]
    with pytest.raises(Failed, match="the weights differ by 1e-03"):
        rows_same_step.one_rank(runner(tmp_path, two, single))
    autocasts = {"event": "precision", "eps": 0.0078125}
    run = runner(tmp_path, ([*two[0], autocasts], two[1]), single)
    assert rows_same_step.one_rank(run) == "same samples in all 1 steps, weights within 1e-03"


def test_weights_that_differ_before_the_odd_step_show_nothing(tmp_path: Path) -> None:
    """Weights at one rank already differ before the first step with unequal shards."""
    two = [loader(), batch(1, 0, 1), step(1, weights=3.0, weights_before=2.0)], [loader(), batch(1, 2), step(1)]
    single = [loader(), batch(1, 0, 1, 2), step(1, weights=1.0, weights_before=1.0)]
    with pytest.raises(CannotTell, match="weights at 1 rank differ before step 1, the first with unequal shards"):
        rows_same_step.odd_batch(runner(tmp_path, two, single))


def epochs(*orders: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the events of an epoch for each order of keys."""
    events = []
    for number, keys in enumerate(orders, 1):
        events += [loader(number), {**batch(number, *keys), "loader": number}, step(number)]
    return events


def test_the_order_of_keys_with_several_items_is_compared(tmp_path: Path) -> None:
    """The keys are (index, epoch) in one order, or (task, index) with two alternating tasks."""
    same = epochs([[2, 0], [1, 0], [3, 0]], [[2, 1], [1, 1], [3, 1]])
    with pytest.raises(Failed, match=r"both epochs have the same order: 2, 1, 3\.\.\."):
        rows_same_step.epoch_order(runner(tmp_path / "same", (same,), same))
    tasks = epochs([[1, 0], [0, 0], [1, 1], [0, 1]], [[1, 1], [0, 0], [1, 0], [0, 1]])
    assert rows_same_step.epoch_order(runner(tmp_path / "tasks", (tasks,), tasks)) == "2 epochs in 2 orders"


def evaluates(number: int, *keys: int, size: int = 3) -> list[dict[str, Any]]:
    """Return the events of an evaluation of a rank's keys."""
    indices = {"event": "batch", "loader": number, "number": 100 + number, "indices": keys, "trains": False}
    return [loader(number, size, 1), *([indices] if keys else []), {"event": "end", "loader": number}]


def test_an_evaluation_without_an_example_fails(tmp_path: Path) -> None:
    """The loader drops the only batch of each rank."""
    train = [loader(), batch(1, 0), step(1)]
    run = runner(tmp_path, ([*train, *evaluates(2)], [*train, *evaluates(2)]), train)
    with pytest.raises(Failed, match="at 2 ranks none of 3 examples counts"):
        rows_same_step.evaluation(run)


def test_a_training_loader_without_a_batch_is_no_evaluation(tmp_path: Path) -> None:
    """Begin a loader at the end of an epoch."""
    train = [loader(), batch(1, 0), step(1), loader(2), {"event": "end", "loader": 2}]
    assert not read(tmp_path / "empty", train).records.evaluations()


def test_a_run_at_other_ranks_may_have_no_evaluation(tmp_path: Path) -> None:
    """Two ranks divide the examples, and the run at three ranks has too few steps for an evaluation."""
    train = [loader(), batch(1, 0), step(1)]
    run = runner(tmp_path, ([*train, *evaluates(2, 0, 1, size=2)], [*train, *evaluates(2, size=2)]), train)
    run.other = 3
    run.at_other = read(tmp_path / "other", train)
    with pytest.raises(CannotTell, match="no evaluation at 3 ranks: choose --other-n, or evaluate more often"):
        rows_same_step.evaluation(run)


@pytest.mark.parametrize("sizes", [(26, 25), (25, 25)])
def test_keys_are_not_compared_if_each_rank_numbers_its_own_examples(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Each rank trains on its own dataset, whose size is the same on both ranks or not."""
    ranks = [[loader(size=size), batch(1, 0), step(1)] for size in sizes]
    run = runner(tmp_path, ranks, [loader(size=sum(sizes)), batch(1, 0, 1), step(1)])
    for row in (rows_same_step.odd_batch, rows_same_step.one_rank):
        with pytest.raises(NotSeen, match="each rank numbers its own examples"):
            row(run)


def test_an_evaluation_of_a_part_of_the_training_dataset_lacks_no_example(tmp_path: Path) -> None:
    """A sampler splits one dataset of six examples into three for training, two for validation and one for a test."""
    train = [loader(size=6), batch(1, 0, 1, 2), step(1)]
    whole = [*train, *evaluates(2, 3, 4, size=6), *evaluates(3, 5, size=6)]
    read_evaluations = [each.size for each in read(tmp_path / "whole", whole).records.evaluations()]
    assert read_evaluations == [2, 1]
    with_training = [*train, *evaluates(2, 2, 3, 4, size=6)]
    (found,) = read(tmp_path / "with training", with_training).records.evaluations()
    assert found.size == 6
    other_dataset = [*train, *evaluates(2, 3, 4, size=7)]
    (found,) = read(tmp_path / "other", other_dataset).records.evaluations()
    assert found.size == 7


def test_shards_of_an_evaluation_are_paired_if_a_rank_loads_another_batch(tmp_path: Path) -> None:
    """Rank 0 loads a batch before the training. The third process evaluates nothing."""
    train = [loader(), batch(1, 0), step(1)]
    looks = [loader(8), {**batch(7, 5), "loader": 8}, {"event": "gone", "loader": 8}]
    ranks = [*looks, *train, *evaluates(9, 0, 2)], [*train, *evaluates(2, 1)], train
    message = rows_same_step.evaluation(runner(tmp_path, ranks[:2], train))
    assert message == "at 2 ranks each of 3 examples counts once"
    (found,) = read(tmp_path / "three", *ranks).records.evaluations()
    assert found.counts == {0: 1, 1: 1, 2: 1}
