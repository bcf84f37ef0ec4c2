"""Describe mnist_lightning for the common tests. It has the models and options of mnist_ddp."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# Other tests compare mnist_lightning's losses with the other torch programs, and cover core's watchdog.
SPEC = replace(
    MNIST,
    preload=("torch", "pytorch_lightning"),
    skipped_marks=("core_only", "best", "kills", "launcher", "stall", "stragglers", "torchrun", "weights"),
)
