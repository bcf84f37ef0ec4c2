"""Test the rows that compare world sizes and evaluations, on recorded events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samestep_check import rows_same_step
from samestep_check.records import Records
from samestep_check.runner import CLOSE, Undisturbed
from samestep_check.verdicts import CannotTell, Failed
from test_source import batch, records, step

Events = Sequence[dict[str, Any]]


def loader(number: int = 1, size: int = 9, batches: int = 9) -> dict[str, Any]:
    """Return the event of a loader that begins."""
    return {"event": "iterate", "loader": number, "size": size, "batches": batches}


def read(folder: Path, *ranks: Events) -> Undisturbed:
    """Return an undisturbed run with the events of each rank."""
    folder.mkdir(exist_ok=True)
    found: Records = records(folder, *ranks)
    return Undisturbed(found, found.steps(), losses=0, warnings=0, duration=1.0)


def runner(folder: Path, ranks: Sequence[Events], single: Events) -> Any:
    """Return a stand-in for the runner, with the runs at several ranks and at one rank."""
    reference = read(folder / "ranks", *ranks)
    alone = read(folder / "single", single)
    return SimpleNamespace(
        ranks=len(ranks),
        reference=reference,
        twin=reference,
        single=alone,
        steps=reference.steps,
        samples=lambda: [each.indices for each in reference.steps],
        bound=lambda: CLOSE,
    )


def test_repeated_samples_fail_only_if_one_rank_repeats_fewer(tmp_path: Path) -> None:
    """Draw samples with replacement, alike at one rank and at two. Then pad the last batch at two ranks."""
    weights = {"weights": 1.0, "weights_before": 1.0}
    single = [loader(), batch(1, 0, 0, 3), step(1, **weights)]
    two = [loader(), batch(1, 0, 0), step(1, **weights)], [loader(), batch(1, 3), step(1, **weights)]
    assert "no more samples are repeated than at 1 rank" in rows_same_step.odd_batch(runner(tmp_path, two, single))
    padded = [loader(), batch(1, 0, 0), step(1)], [loader(), batch(1, 3, 0), step(1)]
    with pytest.raises(Failed, match="1 samples are repeated in an epoch, to fill the last batch"):
        rows_same_step.odd_batch(runner(tmp_path, padded, single))
