"""Define the options of this app, which extend the options that all apps share.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep import ConfigError
from samestep.hooks import AppHooks
from samestep.options import (
    DATA,
    LOGGING,
    MODEL,
    CommonOptions,
    Parser,
    add_local_rank,
    bounded_float,
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

TORCHVISION = "torchvision==0.28.0"  # package for --input torchvision; the app's locks omit this package
LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}

fraction = bounded_float(0.0, below=1.0)


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    lr: float = lr_option("0.03 with sgd, 0.001 with adam")
    device: str = device_option("auto", "cpu", "cuda")
    dataset: str = dataset_option("mnist", "fashion-mnist", "mnist-5k")
    start_method: str | None = start_method_option()
    virtual_ranks: int | None = virtual_ranks_option()
    threads: int | None = threads_option()
    trace_every: int = trace_every_option()
    share_gpu: bool = share_gpu_option()
    model: str = option(
        "net", "network: net with 21,840 parameters, or lenet with 61,610", group=MODEL, choices=("net", "lenet")
    )
    dropout: float = option(0.5, "dropout probability of net", group=MODEL, type=fraction, metavar="P")
    optimizer: str = option("sgd", "optimizer", choices=("sgd", "adam"))
    momentum: float = option(0.9, "momentum of sgd", type=fraction, metavar="M")
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))
    backend: str = option(
        "auto",
        "library for collectives; auto: nccl on GPUs, gloo on CPUs",
        may_change=True,
        choices=("auto", "gloo", "nccl"),
    )
    input: str = option(
        "memory",
        "source of training batches: a tensor of all images, or torchvision's MNIST and a DataLoader; losses are equal",
        group=DATA,
        may_change=True,
        choices=("memory", "torchvision"),
    )
    log_format: str = option(
        "plain",
        "lines of log/rank-<r>.log: time and text, or full: level|time|path|line| text",
        group=LOGGING,
        may_change=True,
        choices=("plain", "full"),
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train a small CNN on MNIST with PyTorch DistributedDataParallel: every step is the same "
        "at any number of ranks, and a killed run resumes."
    )
    parser = make_parser(Options, description, prog=prog, usage=usage)
    parser.add_argument("--gpu", dest="device", action="store_const", const="cuda", help="the same as --device cuda")
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    if options.backend == "nccl" and options.device == "cpu":
        raise ConfigError("--backend nccl needs GPUs: use --device cuda, or --backend gloo")
    return options


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if the options need torchvision or an NVIDIA driver that is missing.

    If PYTHON= selects another environment, the function checks nothing.
    """
    if os.environ.get("PYTHON"):
        return
    if options.input == "torchvision" and "torchvision" not in Path(__file__).with_name("requirements.in").read_text():
        raise ConfigError(f"--input torchvision: name a Python with torch and {TORCHVISION} by PYTHON=")
    has_driver = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi")
    if options.backend == "nccl" and not has_driver:
        raise ConfigError("--backend nccl: this machine has no NVIDIA driver: use --backend gloo")


HOOKS: AppHooks[Options] = AppHooks(check_ranks=check_ranks)
