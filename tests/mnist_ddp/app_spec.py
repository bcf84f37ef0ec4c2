"""Describe mnist_ddp for the common cases; for this app the test suite also runs the cases of core alone."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# The other torch programs, and a plain loop, are compared with its first variant.
SPEC = replace(MNIST, virtual_ranks=8, skipped_marks=())
