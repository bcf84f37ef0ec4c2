"""Convert the trained weights to arrays and back. The arrays have the names of Hugging Face's and peft's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from samestep import untrusted
from samestep.checkpoint import Arrays, state_dict_diff
from samestep.options import Options
from samestep.run import Groups
from samestep.torch.weights import load_optimizer, optimizer_arrays
from torch import nn
from torch.optim import Optimizer


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each trained parameter once, by its name in the weights file.

    The names of LoRA's matrices equal the names in peft's adapter_model.safetensors, which lack the part ``default``.
    """
    named = model.named_parameters()
    return {name.replace(".default.", "."): parameter for name, parameter in named if parameter.requires_grad}


def model_arrays(model: nn.Module) -> Arrays:
    """Return the trained weights as arrays on the CPU, by name."""
    return {name: parameter.detach().cpu().numpy() for name, parameter in trained_parameters(model).items()}


def groups(model: nn.Module, optimizer: Optimizer) -> Groups:
    """Return the arrays of a checkpoint: ``{"model": {name: array}, "optimizer": {name: array}}``."""
    return {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}


@torch.no_grad()
def load_model(model: nn.Module, arrays: Arrays) -> None:
    """Load arrays that `model_arrays` returned.

    Raises:
        ValueError: names, shapes or dtypes differ from the model's.
    """
    difference = state_dict_diff(arrays, model_arrays(model))
    if difference:
        raise ValueError(difference)
    for name, parameter in trained_parameters(model).items():
        parameter.copy_(torch.from_numpy(arrays[name]))


def read_header(run_dir: Path) -> dict[str, Any]:
    """Return the object in the first line of a run's metrics.jsonl.

    Raises:
        OSError: the file cannot be read.
        ValueError, TypeError: the line is not a JSON object.
    """
    with untrusted.open_to_read(run_dir / "metrics.jsonl") as file:
        return untrusted.parse_object(file.readline(untrusted.MAX_BYTES))


def check_base(options: Options) -> None:
    """Raise ValueError if the file of --init-from has LoRA matrices for another base model.

    The function reads the base model from metrics.jsonl in the file's folder, and checks nothing without metrics.jsonl.
    """
    if not options.lora or options.init_from is None:
        return
    try:
        recorded = read_header(options.init_from.parent)["options"]
        base = (recorded["model"], recorded["model_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if base != (options.model, options.model_sha256):
        raise ValueError(
            f"it was trained on {untrusted.shown(base[0])}, whose weights are not those of --model {options.model}"
        )


def load(options: Options, model: nn.Module, optimizer: Optimizer, groups: Groups) -> None:
    """Load arrays that `groups` returned, or the weights of --init-from.

    Raises:
        ValueError: an array does not fit the model or the optimizer, or `check_base` raises it.
    """
    if "optimizer" not in groups:
        check_base(options)
    load_model(model, groups["model"])
    load_optimizer(model, optimizer, groups.get("optimizer", {}))
