"""The values for the common tests that all apps on MNIST share."""

from __future__ import annotations

from harness import App

MNIST = App(
    metric="test_accuracy",
    direction="max",
    metric_limit=0.95,
    dataset="mnist-5k",
    test_examples=1000,
    # 4,000 samples in global batches of 250 make 16 steps per epoch.
    small=("--dataset=mnist-5k", "--epochs=3", "--global-batch-size=250", "--checkpoint-every=5", "--log-every=1"),
    exact=("--dataset=mnist-5k", "--dtype=float64", "--log-every=1", "--epochs=100"),
    variants=[
        ("--model=net", "--optimizer=sgd"),
        ("--model=net", "--optimizer=adam"),
        ("--model=lenet", "--optimizer=sgd"),
        ("--model=lenet", "--optimizer=adam"),
    ],
    resume_invariants=[
        "--model=lenet",
        "--global-batch-size=251",
        "--seed=7",
        "--optimizer=adam",
        "--dtype=float64",
        "--lr=0.5",
        "--dropout=0.1",
        "--dataset=fashion-mnist",
    ],
)
