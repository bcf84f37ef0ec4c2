"""Define the options of this app: those that every app has, and its own.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from samestep.options import (
    Options,
    Parser,
    add_common,
    add_local_rank,
    add_share_gpu,
    add_start_method,
    add_virtual_ranks,
    bounded_float,
)

LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}
LOGGERS = ("csv", "tensorboard", "none")


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small CNN on MNIST with PyTorch Lightning: every step is the same at any number of ranks, "
        "and a killed run resumes.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=128,
        lr="0.03 with sgd, 0.001 with adam",
        datasets=("mnist", "fashion-mnist", "mnist-5k"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("logger",),
    )
    add_start_method(parser)
    add_virtual_ranks(parser)
    add_share_gpu(parser.group("Training"))
    default, fraction = "(default: %(default)s)", bounded_float(0.0, below=1.0)
    add = parser.group("Model").add_argument
    models = f"network: net with 21,840 parameters, or lenet with 61,610 {default}"
    add("--model", choices=("net", "lenet"), default="net", help=models)
    add("--dropout", type=fraction, default=0.5, metavar="P", help=f"dropout probability of net {default}")
    add = parser.group("Training").add_argument
    add("--optimizer", choices=("sgd", "adam"), default="sgd", help=f"optimizer {default}")
    add("--momentum", type=fraction, default=0.9, metavar="M", help=f"momentum of sgd {default}")
    add("--dtype", choices=("float32", "float64"), default="float32", help=f"type of weights and gradients {default}")
    add = parser.group("Logging and tracking").add_argument
    logger = f"Lightning's logger, which writes to log/lightning in the run dir {default}"
    add("--logger", choices=LOGGERS, default="csv", help=logger)
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in. Raises ConfigError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    return options
