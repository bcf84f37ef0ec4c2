"""Define the options of this app, which extend the options that all apps share.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep import ConfigError
from samestep.hooks import AppHooks
from samestep.options import (
    FAULT_TOLERANCE,
    MODEL,
    CommonOptions,
    Parser,
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
    virtual_ranks_option,
)

LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}
VIRTUAL_RANKS = 8

fraction = bounded_float(0.0, below=1.0)


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    lr: float = lr_option("0.03 with sgd, 0.001 with adam")
    device: str = device_option("auto", "cpu", "cuda")
    dataset: str = dataset_option("mnist", "fashion-mnist", "mnist-5k")
    start_method: str | None = start_method_option()
    virtual_ranks: int | None = virtual_ranks_option(VIRTUAL_RANKS)
    threads: int | None = threads_option()
    share_gpu: bool = share_gpu_option()
    min_ranks: int = option(
        1,
        "ranks below which training waits for lost ones",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=bounded_int(1),
        metavar="M",
    )
    allow_mixed: bool = option(
        False,
        "also take ranks with another processor, number of threads or version; the bits may then differ",
        group=FAULT_TOLERANCE,
        may_change=True,
    )
    model: str = option(
        "net", "network: net with 21,840 parameters, or lenet with 61,610", group=MODEL, choices=("net", "lenet")
    )
    dropout: float = option(0.5, "dropout probability of net", group=MODEL, type=fraction, metavar="P")
    optimizer: str = option("sgd", "optimizer", choices=("sgd", "adam"))
    momentum: float = option(0.9, "momentum of sgd", type=fraction, metavar="M")
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train a small CNN on MNIST while ranks come and go. If a rank is lost, the others go on "
        "within a second, and the weights have the same bits as those of an uninterrupted run at "
        "any number of ranks."
    )
    return make_parser(Options, description, prog=prog, usage=usage)


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    if not options.virtual_ranks:
        raise ConfigError("--virtual-ranks 0: this app sums in a fixed tree: name the most ranks that will train")
    if options.device == "cuda" and not options.share_gpu:
        raise ConfigError("--device cuda: ranks that come and go share one GPU: add --share-gpu")
    return options


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if --min-ranks is above the number of ranks on this machine."""
    if options.min_ranks > ranks:
        raise ConfigError(f"--min-ranks {options.min_ranks} is above {ranks} ranks: start more")


HOOKS: AppHooks[Options] = AppHooks(late_machines=True, check_ranks=check_ranks)
