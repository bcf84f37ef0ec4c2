"""Describe lenet_paddle for the common tests."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

SPEC = replace(
    MNIST,
    exact=("--dataset=mnist-5k", "--dtype=float64", "--log-every=1", "--epochs=100"),
    variants=[("--optimizer=sgd",), ("--optimizer=adam",), ("--api=fleet",), ("--api=highlevel",)],
    resume_invariants=[
        "--api=fleet",
        "--global-batch-size=251",
        "--optimizer=sgd",
        "--dtype=float64",
    ],
    defaults=("--epochs=10",),
    launcher="paddle.distributed.launch",
    skipped_marks=("core_only", "best", "kills", "stragglers"),
)
