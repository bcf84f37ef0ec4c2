"""Test how same_step_elsewhere.py evaluates the output of programs. The tox environment `elsewhere` runs them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT

pytestmark = pytest.mark.core_only
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "same_step_elsewhere.py"))
EXAMPLES = SCRIPT["EXAMPLES"]
EPOCHS = SCRIPT["EPOCHS"]


def training(loss: float, lr: float | None, extra: list[int]) -> Any:
    """Return a `Training` with one update per epoch, over all samples and the samples ``extra``."""
    update = SCRIPT["Update"](loss, sorted([*range(EXAMPLES), *extra]), lr)
    return SCRIPT["Training"]([update] * EPOCHS, 0.5, 256 + len(extra))


def test_the_loss_of_an_update_is_the_mean_over_the_samples_of_all_ranks_and_micro_batches() -> None:
    def rank(*parts: tuple[int, list[int], float]) -> dict[str, Any]:
        trained = [{"update": k, "indices": indices, "loss": loss, "lr": 0.1 / (k + 1)} for k, indices, loss in parts]
        return {"trained": trained, "accuracy": 0.75, "examples": 4}

    merged = SCRIPT["merge"]([rank((0, [3, 1], 2.0), (0, [5], 5.0), (1, [7], 1.0)), rank((0, [2], 1.0), (1, [7], 3.0))])
    assert [(each.loss, each.samples, each.lr) for each in merged.updates] == [
        (10 / 4, [1, 2, 3, 5], 0.1),
        (2.0, [7, 7], 0.05),
    ]
    assert (merged.accuracy, merged.examples) == (0.75, 4)


def test_the_table_tells_what_differs_from_one_rank_and_what_is_the_same(tmp_path: Path) -> None:
    one = training(2.0, 0.1, [])
    found = {
        "alike": {1: one, 4: one},
        "apart": {1: one, 4: training(2.5, 0.09, [0, 0])},
        "no rates": {1: training(2.0, None, []), 4: training(2.0, None, [])},
    }
    head, _, alike, apart, rateless = SCRIPT["table"](found).splitlines()
    assert "losses at 4 ranks differ by" in head
    assert (
        alike
        == f"| alike | 0.0e+00 | {EPOCHS} of {EPOCHS} | {EPOCHS} of {EPOCHS} | 0 | same | 0.500, 0.500 | 256, 256 |"
    )
    repeats = 2 * EPOCHS
    assert apart == f"| apart | 2.5e-01 | 0 of {EPOCHS} | 0 of {EPOCHS} | {repeats} | 10.0% | 0.500, 0.500 | 256, 258 |"
    assert rateless == alike.replace("alike", "no rates").replace("same", "not logged")
    SCRIPT["write"](tmp_path / "found.json", "a machine", found)
    assert SCRIPT["read"](tmp_path / "found.json") == ("a machine", found)


def test_losses_are_alike_until_the_first_that_is_not() -> None:
    losses = {1: [2.0, 1.5, 1.0, 0.5], 4: [2.0 + 1e-9, 1.5, 1.1, 0.5]}
    one, four = (SCRIPT["Training"]([SCRIPT["Update"](each, []) for each in losses[n]], 0.5, 256) for n in losses)
    assert (SCRIPT["alike"](one, four), SCRIPT["alike"](one, one)) == (2, 4)
    assert max(SCRIPT["differences"](one, four)) == pytest.approx(0.1)


def test_programs_that_made_unlike_numbers_of_updates_are_not_compared() -> None:
    one = training(2.0, 0.1, [])
    with pytest.raises(ValueError, match=rf"{EPOCHS} updates at 1 rank, but {EPOCHS - 1}"):
        SCRIPT["differences"](one, SCRIPT["Training"](one.updates[1:], 0.5, 256))


def test_the_page_keeps_what_is_written_around_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = SCRIPT["MARKS"]
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    SCRIPT["write_page"](page, "new")
    assert page.read_text() == f"before\n{marks[0]}\nnew\n{marks[1]}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match=r"error: .*page\.md lacks the lines"):
        SCRIPT["write_page"](page, "new")
    assert page.read_text() == "no marks\n"
