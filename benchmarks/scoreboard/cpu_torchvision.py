"""An adapter for `samestep check` that makes torchvision's wheel importable beside a CPU torch.

The wheel for x86-64 is built for a CUDA torch. Beside a CPU torch, its import fails because operators are missing.
This adapter declares these operators, which the examples do not call.
"""

from __future__ import annotations

import contextlib
from typing import Any

from samestep_record import after_import


def declare(torch: Any) -> None:
    torch.samestep_library = library = torch.library.Library("torchvision", "DEF")  # keeps the operators declared
    with contextlib.suppress(RuntimeError):  # the call fails if the operators are already declared
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


after_import("torch", declare)
