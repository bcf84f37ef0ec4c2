"""Describe mnist_lightning for the common cases: mnist_ddp's models with mnist_ddp's options."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# Other tests compare its losses with the other torch programs' and show that core's watchdog finds a stalled rank.
SPEC = replace(
    MNIST,
    preload=("torch", "pytorch_lightning"),
    skipped_marks=("core_only", "best", "kills", "launcher", "stall", "stragglers", "torchrun", "weights"),
)
