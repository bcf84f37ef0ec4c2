"""Describe cifar_ddp for the common tests."""

from __future__ import annotations

from harness import App

EVERYTHING = (
    *("--optimizer=adamw", "--schedule=cosine", "--warmup-steps=5", "--clip-norm=1", "--accumulate=3"),
    *("--dropout=0.2", "--label-smoothing=0.1", "--ema=0.99"),
)

SPEC = App(
    dataset="synthetic-cifar10",
    train_examples=1_024,
    test_examples=256,
    metric="test_accuracy",
    direction="max",
    metric_limit=0.9,
    loss_factor=0.5,
    # 1,024 samples in batches of 64 make 16 steps per epoch. Killed, stopped and resumed runs have every option on.
    small=(
        *("--dataset=synthetic-cifar10", "--epochs=2", "--global-batch-size=64", "--checkpoint-every=5"),
        *("--log-every=1", "--input=loader", "--workers=1", *EVERYTHING),
    ),
    exact=("--dataset=synthetic-cifar10", "--dtype=float64", "--log-every=1", "--epochs=100"),
    variants=[EVERYTHING, ("--norm=group", "--optimizer=sgd")],
    resume_invariants=[
        "--model=resnet18",
        "--global-batch-size=65",
        "--seed=7",
        "--optimizer=sgd",
        "--dtype=float64",
        "--lr=0.5",
        "--epochs=4",
        "--accumulate=2",
        "--ema=0.9",
        "--schedule=linear",
        "--compile",
        "--dataset=fashion-mnist",
    ],
    defaults=("--log-every=1",),
    parts=(40, 3),
    exact_steps=(50, 6),
    first_steps=("--lr=0.01",),  # at 0.1, rounding in float32 grows to 1e-3 in five steps
    virtual_ranks=4,
    replayed_steps=10,
    delay=30,  # ms that a slow rank sleeps in each of three micro-batches
    skipped_marks=("core_only", "best", "faults", "kills", "launcher", "stall", "stragglers", "torchrun", "weights"),
)
