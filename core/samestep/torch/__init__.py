"""Provide independent parts for PyTorch training loops, and the code that PyTorch apps share.

The parts work with PyTorch's own models, optimizers and DataLoaders, and leave the training loop to the program:

* `GlobalBatchSampler`, `GlobalTokenBatchSampler`, `EvalSampler`, `DataLoader`, `Seeded`: global batches that are the
  same at any world size.
* `exact`, with `Rows` and `FixedRows`: batch norm and dropout over the global batch.
* `global_mean`, `global_sum`: means and sums over all ranks.
* `Checkpoints`, `StopRequests`: resume a killed or stopped program, so that it ends with the same weights.

`trainer.ExactTrainer` is a subclass of Hugging Face's Trainer with these parts. Apps use the modules `distributed`,
`reduction`, `updates`, `virtual_ranks` and `weights`.

This package works with torch 2.11 and 2.13. The rest of samestep does not import torch.
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
    """Import a part at its first use, so that a program loads only the modules that it uses."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return vars(module)[name]
