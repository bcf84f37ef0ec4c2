"""Independent parts for PyTorch training loops, and the code that PyTorch apps share.

The parts take plain torch objects, and never wrap a training call:

* `GlobalBatchSampler`, `GlobalTokenBatchSampler`, `EvalSampler`, `DataLoader`, `Seeded`: the same global batches at any
  number of ranks.
* `exact`, with `Rows` and `FixedRows`: batch norm and dropout over the global batch.
* `global_mean`, `global_sum`: means and sums over all ranks.
* `Checkpoints`, `StopRequests`: a killed or stopped program that ends with the same weights.

`frameworks` checks the settings of Hugging Face's Trainer. The modules `distributed`, `reduction`, `updates`,
`virtual_ranks` and `weights` serve the apps.

It works with torch 2.11 and 2.13; the rest of samestep imports without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.torch.checkpoints import Checkpoints
    from samestep.torch.exact_model import exact
    from samestep.torch.loaders import DataLoader, Seeded
    from samestep.torch.losses import global_mean, global_sum
    from samestep.torch.samplers import EvalSampler, FixedRows, GlobalBatchSampler, Rows
    from samestep.torch.stops import StopRequests
    from samestep.torch.token_sampler import GlobalTokenBatchSampler

__all__ = [
    "Checkpoints",
    "DataLoader",
    "EvalSampler",
    "FixedRows",
    "GlobalBatchSampler",
    "GlobalTokenBatchSampler",
    "Rows",
    "Seeded",
    "StopRequests",
    "exact",
    "global_mean",
    "global_sum",
]

_MODULES = {
    "Checkpoints": "checkpoints",
    "DataLoader": "loaders",
    "EvalSampler": "samplers",
    "FixedRows": "samplers",
    "GlobalBatchSampler": "samplers",
    "GlobalTokenBatchSampler": "token_sampler",
    "Rows": "samplers",
    "Seeded": "loaders",
    "StopRequests": "stops",
    "exact": "exact_model",
    "global_mean": "losses",
    "global_sum": "losses",
}


def __getattr__(name: str) -> Any:
    """Import a part when it is first used, so that one name does not load the others."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return vars(module)[name]
