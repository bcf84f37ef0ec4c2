"""The README's figures: how far the usual ways to write a step change a training."""

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
    """Each way by itself, and none of them."""
    reported = told_by("cifar_ddp", "import wrong_ways; wrong_ways.main()")
    right = [reported.pop(f"{divided}: none") for divided in ("ranks", "micro-batches", "resumed")]
    assert max(right) < 1e-12
    assert right[-1] == 0
    # The README's numbers; another processor or torch may round differently.
    assert reported.keys() == APART.keys()
    assert all(apart / 3 < reported[way] < 3 * apart for way, apart in APART.items()), reported
