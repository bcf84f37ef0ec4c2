"""Describe mnist_elastic for the common tests that apply. The app's own tests cover faults, which do not end a job."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

SPEC = replace(
    MNIST,
    launcher="torchft",
    virtual_ranks=8,
    skipped_marks=("core_only", "best", "kills", "launcher", "stall", "stragglers", "weights"),
)
