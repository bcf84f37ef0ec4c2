"""What the common cases need to know of resnet50_mindspore."""

from __future__ import annotations

from harness import App

ROW = App(
    accuracy=0.8,
    dataset="synthetic-cifar10",
    test_examples=256,
    # 1,024 samples by 256: 4 steps an epoch. Smaller images take less time.
    small=(
        *("--dataset=synthetic-cifar10", "--depth=18", "--image-size=16", "--epochs=2", "--max-steps=8"),
        *("--global-batch-size=256", "--checkpoint-every=2", "--log-every=1"),
    ),
    # MindSpore on CPU knows float32 alone, so rounding must be kept from growing.
    exact=(
        *("--dataset=synthetic-cifar10", "--depth=18", "--image-size=16", "--freeze-bn", "--lr=1e-3"),
        *("--log-every=1", "--epochs=100"),
    ),
    variants=[("--loss=expand",), ("--loss=builtin", "--api=highlevel")],
    tolerance=1e-4,
    arithmetic=[
        ("--depth=50", "--depth 18", "50"),
        ("--global-batch-size=255", "--global-batch-size 256", "255"),
        ("--seed=7", "--seed 1", "7"),
        ("--lr=0.5", "--lr 0.01", "0.5"),
        ("--momentum=0.5", "--momentum 0.9", "0.5"),
        ("--freeze-bn", "--freeze-bn False", "True"),
        ("--drop-remainder", "--drop-remainder None", "True"),
        ("--image-size=32", "--image-size 16", "32"),
        ("--loss=builtin", "--loss expand", "builtin"),
        ("--dataset=cifar10", "--dataset synthetic-cifar10", "cifar10"),
    ],
    epoch=4,
    every=2,
    defaults=("--depth=18", "--epochs=3", "--log-every=1"),
    batches=(10, 341),
    exact_steps=(6, 4),
    first_steps=("--depth=18", "--image-size=16", "--freeze-bn", "--lr=1e-3"),
    first_tolerance=1e-4,
    relay=(256, ((2, 2), (3, 5), (1, 6), (4, 8))),
    diverges=("--lr=1e30", "--freeze-bn"),  # batch normalisation keeps it finite
    patience=40,
    kills=5,
    left_out=("once", "stall", "slow"),  # each start compiles for 13 s
)
