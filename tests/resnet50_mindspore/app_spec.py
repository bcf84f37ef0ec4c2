"""Describe resnet50_mindspore for the common tests."""

from __future__ import annotations

from harness import App

SPEC = App(
    metric="test_accuracy",
    direction="max",
    metric_limit=0.8,
    dataset="synthetic-cifar10",
    test_examples=256,
    # 1,024 samples in global batches of 256 make 4 steps per epoch. Smaller images make a step faster.
    small=(
        *("--dataset=synthetic-cifar10", "--depth=10", "--image-size=16", "--epochs=2", "--max-steps=8"),
        *("--global-batch-size=256", "--checkpoint-every=2", "--log-every=1"),
    ),
    # MindSpore on CPU has float32 only, so the options keep rounding errors small.
    exact=(
        *("--dataset=synthetic-cifar10", "--depth=10", "--image-size=16", "--freeze-bn", "--lr=1e-3"),
        *("--log-every=1", "--epochs=100"),
    ),
    variants=[("--loss=expand",), ("--loss=builtin", "--api=highlevel")],
    tolerance=1e-4,
    parts=(100, 3),
    launcher="msrun",
    resume_invariants=[
        "--depth=50",
        "--global-batch-size=255",
        "--seed=7",
        "--lr=0.5",
        "--momentum=0.5",
        "--freeze-bn",
        "--drop-remainder",
        "--image-size=32",
        "--loss=builtin",
        "--dataset=cifar10",
    ],
    defaults=("--depth=18", "--epochs=3", "--log-every=1"),
    exact_steps=(6, 4),
    first_steps=("--depth=10", "--image-size=16", "--freeze-bn", "--lr=1e-3"),
    first_tolerance=1e-4,
    diverges=("--lr=9e37", "--freeze-bn"),  # batch normalization would keep the loss finite
    patience=40,
    delay=2_000,  # another thread reads the batches, so the input takes longer only beyond the time of a step
    slow_phases=("input",),  # the compiled step hides the others
    kills=5,
    virtual_ranks=None,
    # Each start compiles for seconds. The app's test of a rehearsal compares the losses of one rank and two ranks.
    skipped_marks=("core_only", "launcher", "stall", "slow"),
)
