"""Import torchvision with CUDA or CPU builds of torch. Other files of this app import torchvision through this file.

The published wheel for x86-64 needs a CUDA build of torch. A CPU build does not register the wheel's operators, so the
import fails. This file then declares the operators that the import needs. The app does not call these operators.
"""

import torch

try:
    from torchvision import models
except RuntimeError:  # "operator torchvision::nms does not exist"
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models

from torchvision.transforms.v2 import functional

__all__ = ["functional", "models"]
