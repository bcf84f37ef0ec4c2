"""Describe mnist_ddp for the common cases; only this app also runs the cases that core alone determines."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# The other torch programs, and a plain loop, are compared with its first variant.
SPEC = replace(MNIST, virtual_ranks=8, replayed_steps=10, skipped_marks=())
