"""What the common cases need to know of lenet_paddle."""

from __future__ import annotations

from dataclasses import replace

from harness import row

ROW = replace(
    row("mnist_ddp"),
    exact=("--dataset=mnist-5k", "--dtype=float64", "--log-every=1", "--epochs=100"),
    variants=[("--optimizer=sgd",), ("--optimizer=adam",), ("--api=fleet",), ("--api=highlevel",)],
    arithmetic=[
        ("--api=fleet", "--api basic", "fleet"),
        ("--global-batch-size=251", "--global-batch-size 250", "251"),
        ("--optimizer=sgd", "--optimizer adam", "sgd"),
        ("--dtype=float64", "--dtype float32", "float64"),
    ],
    left_out=("once",),
)
