"""Check the README's figures: how much the usual ways to write a step change the training."""

from __future__ import annotations

from harness import told_by

APART = {
    "ranks: mean over ranks": 3e-3,
    "ranks: augmentation": 1e-2,
    "ranks: dropout": 3e-2,
    "ranks: batch norm": 4e-3,
    "ranks: clipping": 9e-3,
    "micro-batches: mean over micro-batches": 4e-3,
    "micro-batches: dropout": 4e-2,
    "resumed: scheduler": 4e-2,
    "resumed: average": 2e-3,
    "bfloat16 weights: updates lost": 0.78,
}


def test_the_usual_ways_make_another_training_of_two_ranks() -> None:
    """Train with each usual way alone, and with none."""
    reported = told_by("cifar_ddp", "import wrong_ways; wrong_ways.main()")
    right = [reported.pop(f"{divided}: none") for divided in ("ranks", "micro-batches", "resumed")]
    assert max(right) < 1e-12
    assert right[-1] == 0
    # Allow a factor of 3 from the README's numbers: another processor or torch version may round differently.
    assert reported.keys() == APART.keys()
    assert all(apart / 3 < reported[way] < 3 * apart for way, apart in APART.items()), reported
