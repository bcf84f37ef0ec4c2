"""Imported by Python at its start in each process of an example: torchvision also imports beside a CPU torch.

The wheel that is published for x86-64 is built for a CUDA torch. Beside a CPU one its compiled operators are not
registered, and its import ends at the first that it names. Here they are declared before it is imported: nobody calls
them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_kept: list[Any] = []  # what a library declares lasts as long as it does


class _BeforeTorchvision:
    """Finds nothing; declares the operators when torchvision is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name != "torchvision" or _kept:
            return
        import torch

        library = torch.library.Library("torchvision", "DEF")
        _kept.append(library)
        try:
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            pass  # a torchvision that fits this torch has registered them


sys.meta_path.insert(0, _BeforeTorchvision())
