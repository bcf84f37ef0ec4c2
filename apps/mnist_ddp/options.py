"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from samestep import ConfigError
from samestep.options import Options, Parser, add_common, bounded_float

LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small CNN on MNIST with PyTorch DistributedDataParallel: the same global batches at any "
        "number of ranks, exact evaluation, and a run that can be killed and resumed.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=128,
        lr="0.03 with sgd, 0.001 with adam",
        datasets=("mnist", "fashion-mnist", "mnist-5k"),
        devices=("auto", "cpu", "cuda"),
    )
    add = parser.add_argument_group("model and optimizer").add_argument
    add("--model", choices=("net", "lenet"), default="net", help="net: 21,840 parameters (the default); lenet: 61,610")
    add("--dropout", type=bounded_float(0.0, below=1.0), default=0.5, metavar="P", help="in net (default: %(default)s)")
    add("--optimizer", choices=("sgd", "adam"), default="sgd", help="(default: %(default)s)")
    add(
        "--momentum", type=bounded_float(0.0, below=1.0), default=0.9, metavar="M", help="of sgd (default: %(default)s)"
    )
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64 for comparisons")
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
    return options
