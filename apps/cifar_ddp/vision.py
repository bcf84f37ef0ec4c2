"""torchvision, imported here alone, and so that it also imports beside a CPU torch.

The wheel that is published for x86-64 is built for a CUDA torch. Beside a CPU one its compiled operators are not
registered, and the import ends at the first that it names. Here they are declared, which is enough: nobody calls them.
"""

import torch

try:
    from torchvision import models
except RuntimeError:  # operator torchvision::nms does not exist
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models

from torchvision.datasets import VisionDataset
from torchvision.transforms.v2 import functional

__all__ = ["VisionDataset", "functional", "models"]
