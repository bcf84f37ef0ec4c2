"""Describe mnist_ddp for the common tests. Only this app also runs the tests whose result core alone decides."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# Other tests compare the other torch programs and a plain loop with mnist_ddp's first variant.
SPEC = replace(MNIST, virtual_ranks=8, replayed_steps=10, skipped_marks=())
