"""What the common cases need to know of mnist_horovod: mnist_ddp's models with mnist_ddp's options."""

from __future__ import annotations

from dataclasses import replace

from harness import row

# tests/conformance compares its losses with mnist_ddp's; a rank that stalls is core's watchdog's matter.
ROW = replace(row("mnist_ddp"), launcher="horovodrun", left_out=("once", "best", "curves", "stall", "stragglers"))
