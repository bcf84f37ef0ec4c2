"""Define the options of this app: those that every app has, and its own.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from samestep import ConfigError
from samestep.options import (
    Options,
    Parser,
    add_common,
    add_share_gpu,
    add_start_method,
    add_virtual_ranks,
    bounded_float,
    bounded_int,
)

LAUNCHER = {"late_machines": True}
LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}
VIRTUAL_RANKS = 8


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small CNN on MNIST while ranks come and go. If a rank is lost, the others go on within a "
        "second, and the weights have the same bits as those of an uninterrupted run at any number of ranks.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=128,
        lr="0.03 with sgd, 0.001 with adam",
        datasets=("mnist", "fashion-mnist", "mnist-5k"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("min_ranks", "allow_mixed"),
    )
    add_start_method(parser)
    add_virtual_ranks(parser)
    add_share_gpu(parser.group("Training"))
    parser.set_defaults(virtual_ranks=VIRTUAL_RANKS)
    default, fraction = "(default: %(default)s)", bounded_float(0.0, below=1.0)
    add = parser.group("Fault tolerance").add_argument
    fewest = f"ranks below which training waits for lost ones {default}"
    add("--min-ranks", type=bounded_int(1), default=1, metavar="M", help=fewest)
    mixed = "also take ranks with another processor, number of threads or version; the bits may then differ"
    add("--allow-mixed", action="store_true", help=mixed)
    add = parser.group("Model").add_argument
    models = f"network: net with 21,840 parameters, or lenet with 61,610 {default}"
    add("--model", choices=("net", "lenet"), default="net", help=models)
    add("--dropout", type=fraction, default=0.5, metavar="P", help=f"dropout probability of net {default}")
    add = parser.group("Training").add_argument
    add("--optimizer", choices=("sgd", "adam"), default="sgd", help=f"optimizer {default}")
    add("--momentum", type=fraction, default=0.9, metavar="M", help=f"momentum of sgd {default}")
    add("--dtype", choices=("float32", "float64"), default="float32", help=f"type of weights and gradients {default}")
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in. Raises ConfigError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if not options.virtual_ranks:
        raise ConfigError("--virtual-ranks 0: this app sums in a fixed tree: name the most ranks that will train")
    if options.device == "cuda" and not options.share_gpu:
        raise ConfigError("--device cuda: ranks that come and go share one GPU: add --share-gpu")
    return options


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if the job could not begin with ``ranks`` on this machine."""
    if options.min_ranks > ranks:
        raise ConfigError(f"--min-ranks {options.min_ranks} is above {ranks} ranks: start more")
