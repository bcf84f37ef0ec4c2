"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

from samestep import ConfigError
from samestep.options import Options, Parser, add_common, bounded_float, bounded_int

LEARNING_RATES = {"sgd": 0.1, "adamw": 0.003}
WEIGHT_DECAYS = {"sgd": 5e-4, "adamw": 0.05}


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a convolutional network on CIFAR-10 with PyTorch DistributedDataParallel and all that "
        "a step has: the same at any number of ranks, exact evaluation, and a run that can be killed and resumed.",
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
    default = "(default: %(default)s)"
    add = parser.add_argument_group("model").add_argument
    models = "a VGG of 242,474 parameters (the default), or torchvision's"
    add("--model", choices=("small", "resnet18", "resnet50"), default="small", help=models)
    add(
        "--stem", choices=("cifar", "imagenet"), help="of a ResNet: 3 x 3 (the default), or 7 x 7 and stride 2 and pool"
    )
    add("--norm", choices=("batch", "group"), default="batch", help="batch: over the global batch, at any N (default)")
    add("--freeze-bn", action="store_true", help="batch normalisation by its stored statistics, also in training")
    add(
        "--dropout",
        type=bounded_float(0.0, below=1.0),
        default=0.1,
        metavar="P",
        help=f"of the last features {default}",
    )
    add = parser.add_argument_group("the step").add_argument
    add("--augment", action=argparse.BooleanOptionalAction, default=True, help="random crop and flip (the default)")
    add("--label-smoothing", type=bounded_float(0.0, below=1.0), default=0.1, metavar="S", help=default)
    add("--accumulate", type=bounded_int(1), default=1, metavar="K", help=f"micro-batches of a global batch {default}")
    add(
        "--clip-norm",
        type=bounded_float(0.0, above=True),
        metavar="C",
        help="of the global batch's gradient (default: none)",
    )
    add("--autocast", choices=("none", "bfloat16"), default="none", help="weights and optimizer stay in float32")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64 for comparisons")
    add(
        "--compile",
        action="store_true",
        help="torch.compile the step's forward and backward passes: needs a C++ compiler",
    )
    first = "as --timeout, until the first step is done (default: that, with --compile 1800)"
    add("--first-step-timeout", type=bounded_float(0.0, above=True), metavar="T", help=first)
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help=default)
    add(
        "--momentum", type=bounded_float(0.0, below=1.0), default=0.9, metavar="M", help=f"of sgd: Nesterov's {default}"
    )
    decay = "of all but norms and biases (default: 5e-4 with sgd, 0.05 with adamw)"
    add("--weight-decay", type=bounded_float(0.0), metavar="W", help=decay)
    schedules = ("cosine", "linear", "step", "one-cycle", "constant")
    add("--schedule", choices=schedules, default="cosine", help=f"of --lr, over --epochs {default}")
    add("--warmup-steps", type=bounded_int(0), default=0, metavar="S", help=f"linear, before the schedule {default}")
    average = "evaluate the weights' moving average with this decay, such as 0.999 (default: the weights)"
    add("--ema", type=bounded_float(0.0, below=1.0), metavar="D", help=average)
    add = parser.add_argument_group("input").add_argument
    ways = "memory: whole batches of a tensor (the default); loader: a DataLoader, for what does not fit; equal losses"
    add("--input", choices=("memory", "loader"), default="memory", help=ways)
    add(
        "--workers",
        type=bounded_int(0),
        default=2,
        metavar="W",
        help=f"processes of the loader, for each rank {default}",
    )
    # torch.distributed.launch gives it beside LOCAL_RANK: by its own name, and before torch 2.0 with an underscore.
    parser.add_argument("--local-rank", "--local_rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and complete the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    local_rank = vars(options).pop("local_rank", None)  # says nothing about the run
    if local_rank not in (None, os.environ.get("LOCAL_RANK")):
        found = os.environ.get("LOCAL_RANK", "not set")
        raise ConfigError(f"--local-rank {local_rank}, but LOCAL_RANK is {found}: start the ranks with torchrun")
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if options.weight_decay is None:
        options.weight_decay = WEIGHT_DECAYS[options.optimizer]
    resnet = options.model.startswith("resnet")
    if options.stem and not resnet:
        raise ConfigError(f"--stem {options.stem} is of a ResNet: leave it out, or choose --model resnet18 or resnet50")
    if options.freeze_bn and options.norm != "batch":
        raise ConfigError(f"--freeze-bn, but --norm {options.norm} has no stored statistics: leave one of them out")
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} computes in less than --dtype float64: leave one of them out")
    compiler = os.environ.get("CXX", "g++")  # as torch's own choice
    if options.compile and not shutil.which(compiler):
        raise ConfigError(f"--compile needs a C++ compiler, and there is no {compiler!r}: install g++, or set CXX")
    if options.first_step_timeout is None:
        options.first_step_timeout = max(options.timeout, 1800.0) if options.compile else options.timeout
    if resnet:
        options.stem = options.stem or "cifar"
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule's horizon; --max-steps only stops before it
    return options
