"""What the common cases need to know of mnist_ddp, for which the matrix also runs the cases of core alone."""

from __future__ import annotations

from dataclasses import replace

from mnist_spec import MNIST

# The other torch programs, and a plain loop, are compared with its first variant.
SPEC = replace(MNIST, skipped_marks=("curves",))
