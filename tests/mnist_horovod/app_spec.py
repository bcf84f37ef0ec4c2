"""Describe mnist_horovod for the common tests. It has the models and options of mnist_ddp."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# Other tests compare mnist_horovod's losses with the other torch programs, and cover core's watchdog.
SPEC = replace(
    MNIST,
    launcher="horovodrun",
    refused_machines="NNODES=2 is not for Horovod",
    skipped_marks=("core_only", "best", "kills", "stall", "stragglers", "weights"),
)
