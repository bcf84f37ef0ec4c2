"""Import torchvision so that it also works with a CPU build of torch. No other file imports it.

The published wheel for x86-64 is built for a CUDA torch. With a CPU torch its compiled operators are not registered,
and the import fails at the first operator that it names. A declaration is enough, because this app calls none of them.
"""

import torch

try:
    from torchvision import models
except RuntimeError:  # operator torchvision::nms does not exist
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models

from torchvision.transforms.v2 import functional

__all__ = ["functional", "models"]
