"""Read a finished run: its options, its tokenizer, the base model, and the trained weights."""

from __future__ import annotations

from pathlib import Path

import weights
from data import Tokenizer
from model import build_model, load_tokenizer
from options import parse, set_model
from samestep import ConfigError, checkpoint
from samestep.options import Options
from torch import nn


def read_options(run_dir: Path) -> Options:
    """Return the options of a run.

    Raises:
        ConfigError: ``run_dir`` is not a run dir of this app and version, or the base model's files have changed.
    """
    options = parse([])
    try:
        header = weights.read_header(run_dir)
        recorded = dict(header["options"])
        is_ours = header["app"] == Path(__file__).resolve().parent.name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_dir} is not a run dir of this app ({error}): name another") from error
    if not is_ours or not vars(options).keys() <= recorded.keys():
        raise ConfigError(f"{run_dir} is a run dir of another app or version: name another")
    vars(options).update(recorded)
    if recorded["data_file"]:
        options.data_file = Path(recorded["data_file"])
    options.requested_model = options.model
    set_model(options)
    if options.model_sha256 != recorded["model_sha256"]:
        raise ConfigError(f"--model {options.model} has changed since {run_dir} was trained: put its files back")
    return options


def load_base(run_dir: Path) -> tuple[Options, Tokenizer, nn.Module]:
    """Return a run's options, its tokenizer, and its model before training.

    Raises:
        ConfigError: the run dir or the base model cannot be used.
    """
    options = read_options(run_dir)
    tokenizer = load_tokenizer(options)
    return options, tokenizer, build_model(options, tokenizer)


def load_trained(run_dir: Path, model: nn.Module) -> None:
    """Load a run's trained weights into ``model``.

    Raises:
        ConfigError: the run has no model.safetensors, or its weights do not fit the model.
    """
    path = run_dir / "model.safetensors"
    if not path.exists():
        raise ConfigError(f"{run_dir} has no model.safetensors: finish the run by its command")
    try:
        weights.load_model(model, checkpoint.load_weights(path))
    except ValueError as error:
        raise ConfigError(f"{path} belongs to another run: {error}: name another run dir") from error
