"""Define the options of this app, which extend the options that all apps share.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from samestep import ConfigError
from samestep.hooks import AppHooks
from samestep.options import (
    DATA,
    FAULT_TOLERANCE,
    MODEL,
    CommonOptions,
    Parser,
    add_local_rank,
    bounded_float,
    bounded_int,
    dataset_option,
    device_option,
    lr_option,
    make_parser,
    option,
    parse_as,
    share_gpu_option,
    start_method_option,
    threads_option,
    trace_every_option,
    virtual_ranks_option,
)

LEARNING_RATES = {"sgd": 0.1, "adamw": 0.003}
WEIGHT_DECAYS = {"sgd": 5e-4, "adamw": 0.05}
fraction = bounded_float(0.0, below=1.0)
positive = bounded_float(0.0, above=True)


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    lr: float = lr_option("0.1 with sgd, 0.003 with adamw")
    device: str = device_option("auto", "cpu", "cuda")
    dataset: str = dataset_option("cifar10", "fashion-mnist", "synthetic-cifar10")
    start_method: str | None = start_method_option()
    virtual_ranks: int | None = virtual_ranks_option()
    threads: int | None = threads_option()
    trace_every: int = trace_every_option()
    share_gpu: bool = share_gpu_option()
    model: str = option(
        "small",
        "network: a VGG with 242,474 parameters (small), or torchvision's",
        group=MODEL,
        choices=("small", "resnet18", "resnet50"),
    )
    stem: str | None = option(
        None,
        "first layers of a ResNet: 3 x 3 (cifar), or 7 x 7 with stride 2 and pooling (imagenet) (default: cifar)",
        group=MODEL,
        choices=("cifar", "imagenet"),
    )
    norm: str = option(
        "batch",
        "normalization: over the global batch, or over groups of channels",
        group=MODEL,
        choices=("batch", "group"),
    )
    freeze_bn: bool = option(False, "normalize by the stored statistics, also in training", group=MODEL)
    dropout: float = option(0.1, "dropout probability before the last layer", group=MODEL, type=fraction, metavar="P")
    augment: bool = option(True, "crop and flip at random (default: augment)", action=argparse.BooleanOptionalAction)
    label_smoothing: float = option(0.1, "label smoothing in training", type=fraction, metavar="S")
    accumulate: int = option(1, "micro-batches per global batch", type=bounded_int(1), metavar="K")
    clip_norm: float | None = option(
        None, "maximum norm of the global batch's gradient (default: none)", type=positive, metavar="C"
    )
    autocast: str = option(
        "none", "type of the forward pass; weights and optimizer stay in float32", choices=("none", "bfloat16")
    )
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))
    compile: bool = option(False, "use torch.compile, which needs a C++ compiler")
    optimizer: str = option("sgd", "optimizer", choices=("sgd", "adamw"))
    momentum: float = option(0.9, "Nesterov momentum of sgd", type=fraction, metavar="M")
    weight_decay: float | None = option(
        None,
        "weight decay, except for norms and biases (default: 5e-4 with sgd, 0.05 with adamw)",
        type=bounded_float(0.0),
        metavar="W",
    )
    schedule: str = option(
        "cosine",
        "learning-rate schedule over --epochs",
        choices=("cosine", "linear", "step", "one-cycle", "constant"),
    )
    warmup_steps: int = option(0, "steps of linear warm-up before the schedule", type=bounded_int(0), metavar="S")
    ema: float | None = option(
        None,
        "decay of a moving average of the weights, which is then evaluated, such as 0.999 (default: none)",
        type=fraction,
        metavar="D",
    )
    input: str = option(
        "memory",
        "source of batches: a tensor of all images, or a DataLoader for larger data; losses are equal",
        group=DATA,
        may_change=True,
        choices=("memory", "loader"),
    )
    workers: int = option(
        2, "processes of --input loader per rank", group=DATA, may_change=True, type=bounded_int(0), metavar="W"
    )
    first_step_timeout: float | None = option(
        None,
        "--timeout in seconds for the first step (default: --timeout; with --compile at least 1800)",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=positive,
        metavar="T",
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train a convolutional network on CIFAR-10 with PyTorch DistributedDataParallel: every "
        "step is the same at any number of ranks, and a killed run resumes."
    )
    parser = make_parser(Options, description, prog=prog, usage=usage)
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    check(options)
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    if options.weight_decay is None:
        options.weight_decay = WEIGHT_DECAYS[options.optimizer]
    if options.first_step_timeout is None:
        options.first_step_timeout = options.timeout
        if options.compile:
            options.first_step_timeout = max(options.timeout, 1800.0)
    if is_resnet(options.model):
        options.stem = options.stem or "cifar"
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule depends on --epochs, but not on --max-steps
    return options


def is_resnet(model: str) -> bool:
    """Return whether ``model`` is a ResNet of torchvision."""
    return model.startswith("resnet")


def check(options: Options) -> None:
    """Raise ConfigError if options contradict each other, or if --compile finds no C++ compiler."""
    if options.stem and not is_resnet(options.model):
        raise ConfigError(f"--stem {options.stem} needs a ResNet: choose --model resnet18 or resnet50, or leave it out")
    if options.freeze_bn and options.norm != "batch":
        raise ConfigError(f"--freeze-bn: --norm {options.norm} has no stored statistics: leave one of them out")
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} is less precise than --dtype float64: leave one of them out")
    if options.virtual_ranks and options.compile:
        raise ConfigError("--compile makes kernels for the shapes that a rank sees: leave it or --virtual-ranks out")
    compiler = os.environ.get("CXX", "g++")  # torch.compile chooses its compiler in the same way
    if options.compile and not shutil.which(compiler):
        raise ConfigError(f"--compile needs a C++ compiler, but {compiler!r} is missing: install g++, or set CXX")


HOOKS: AppHooks[Options] = AppHooks()
