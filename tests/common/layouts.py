"""Digests of the layouts of torchvision's ResNets. One test compares them with torchvision, another with MindSpore."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

# SHA-256 of the layouts of resnet18 and resnet50 with num_classes=10 in torchvision 0.28.0.
TORCHVISION = {
    "18": "54ba454969cf209220cd05a6405a0888d55a5685e227a8068f92f269596880eb",
    "50": "290c4f97aa09ad18f13db933c951e56a98f6c50ea3745ce1858750a510dba57e",
}


def digest(layout: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """Return the SHA-256 of the names, shapes and dtypes ("float32") of a state, in order of name."""
    lines = [f"{name} {[*shape]} {dtype}\n" for name, (shape, dtype) in sorted(layout.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
