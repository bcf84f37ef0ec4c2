"""Define the options of this app: those that every app has, and its own.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

from samestep import ConfigError
from samestep.options import (
    Options,
    Parser,
    add_common,
    add_local_rank,
    add_share_gpu,
    add_start_method,
    add_virtual_ranks,
    bounded_float,
    bounded_int,
)

LEARNING_RATES = {"sgd": 0.1, "adamw": 0.003}
WEIGHT_DECAYS = {"sgd": 5e-4, "adamw": 0.05}


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a convolutional network on CIFAR-10 with PyTorch DistributedDataParallel: every step is the "
        "same at any number of ranks, and a killed run resumes.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=128,
        lr="0.1 with sgd, 0.003 with adamw",
        datasets=("cifar10", "fashion-mnist", "synthetic-cifar10"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("input", "workers", "first_step_timeout"),
    )
    add_start_method(parser)
    add_virtual_ranks(parser)
    add_share_gpu(parser.group("Training"))
    default, fraction, positive = (
        "(default: %(default)s)",
        bounded_float(0.0, below=1.0),
        bounded_float(0.0, above=True),
    )
    add = parser.group("Model").add_argument
    models = f"network: a VGG with 242,474 parameters (small), or torchvision's {default}"
    add("--model", choices=("small", "resnet18", "resnet50"), default="small", help=models)
    stem = "first layers of a ResNet: 3 x 3 (cifar), or 7 x 7 with stride 2 and pooling (imagenet) (default: cifar)"
    add("--stem", choices=("cifar", "imagenet"), help=stem)
    norm = f"normalization: over the global batch, or over groups of channels {default}"
    add("--norm", choices=("batch", "group"), default="batch", help=norm)
    add("--freeze-bn", action="store_true", help="normalize by the stored statistics, also in training")
    add(
        "--dropout",
        type=fraction,
        default=0.1,
        metavar="P",
        help=f"dropout probability before the last layer {default}",
    )
    add = parser.group("Training").add_argument
    add(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="crop and flip at random (default: augment)",
    )
    add("--label-smoothing", type=fraction, default=0.1, metavar="S", help=f"label smoothing in training {default}")
    add("--accumulate", type=bounded_int(1), default=1, metavar="K", help=f"micro-batches per global batch {default}")
    add("--clip-norm", type=positive, metavar="C", help="maximum norm of the global batch's gradient (default: none)")
    autocast = f"type of the forward pass; weights and optimizer stay in float32 {default}"
    add("--autocast", choices=("none", "bfloat16"), default="none", help=autocast)
    add("--dtype", choices=("float32", "float64"), default="float32", help=f"type of weights and gradients {default}")
    add("--compile", action="store_true", help="use torch.compile, which needs a C++ compiler")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help=f"optimizer {default}")
    add("--momentum", type=fraction, default=0.9, metavar="M", help=f"Nesterov momentum of sgd {default}")
    decay = "weight decay, except for norms and biases (default: 5e-4 with sgd, 0.05 with adamw)"
    add("--weight-decay", type=bounded_float(0.0), metavar="W", help=decay)
    schedules = ("cosine", "linear", "step", "one-cycle", "constant")
    add("--schedule", choices=schedules, default="cosine", help=f"learning-rate schedule over --epochs {default}")
    warmup = f"steps of linear warm-up before the schedule {default}"
    add("--warmup-steps", type=bounded_int(0), default=0, metavar="S", help=warmup)
    average = "decay of a moving average of the weights, which is then evaluated, such as 0.999 (default: none)"
    add("--ema", type=fraction, metavar="D", help=average)
    add = parser.group("Data").add_argument
    ways = f"source of batches: a tensor of all images, or a DataLoader for larger data; losses are equal {default}"
    add("--input", choices=("memory", "loader"), default="memory", help=ways)
    add(
        "--workers", type=bounded_int(0), default=2, metavar="W", help=f"processes of --input loader per rank {default}"
    )
    add = parser.group("Fault tolerance").add_argument
    first = "--timeout in seconds for the first step (default: --timeout; with --compile at least 1800)"
    add("--first-step-timeout", type=positive, metavar="T", help=first)
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:  # noqa: C901
    """Return the options with all defaults filled in. Raises ConfigError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if options.weight_decay is None:
        options.weight_decay = WEIGHT_DECAYS[options.optimizer]
    resnet = options.model.startswith("resnet")
    if options.stem and not resnet:
        raise ConfigError(f"--stem {options.stem} needs a ResNet: choose --model resnet18 or resnet50, or leave it out")
    if options.freeze_bn and options.norm != "batch":
        raise ConfigError(f"--freeze-bn: --norm {options.norm} has no stored statistics: leave one of them out")
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} is less precise than --dtype float64: leave one of them out")
    if options.virtual_ranks and options.compile:
        raise ConfigError("--compile makes kernels for the shapes that a rank sees: leave it or --virtual-ranks out")
    compiler = os.environ.get("CXX", "g++")  # as torch chooses
    if options.compile and not shutil.which(compiler):
        raise ConfigError(f"--compile needs a C++ compiler, but {compiler!r} is missing: install g++, or set CXX")
    if options.first_step_timeout is None:
        options.first_step_timeout = max(options.timeout, 1800.0) if options.compile else options.timeout
    if resnet:
        options.stem = options.stem or "cifar"
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule's horizon; --max-steps only stops before it
    return options
