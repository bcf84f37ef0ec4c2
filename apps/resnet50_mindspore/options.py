"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from samestep import UserError
from samestep.options import Options, Parser, add_common, real, whole

ASCEND_DRIVER = Path("/dev/davinci_manager")  # there wherever Ascend's driver is, also in a container
IMAGE_SIZES = {"ascend": 224, "cpu": 32}


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train ResNet on CIFAR-10 with MindSpore: the same global batches at any number of ranks, exact "
        "evaluation, and a run that can be killed and resumed.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=32,
        lr="0.01",
        datasets=("cifar10", "synthetic-cifar10"),
        devices=("auto", "cpu", "ascend"),
    )
    parser.set_defaults(dtype="float32")  # MindSpore's convolutions on CPU know no other
    add = parser.add_argument_group("model and optimizer").add_argument
    add("--depth", type=int, choices=(18, 50), default=50, help="of the ResNet (default: %(default)s)")
    add("--image-size", type=whole(8), metavar="S", help="images are resized to S x S (default: 32, on Ascend 224)")
    add("--freeze-bn", action="store_true", help="batch normalisation by its stored statistics, also in training")
    add("--loss", choices=("expand", "builtin"), default="expand", help="of small operators, or MindSpore's own")
    add("--momentum", type=real(0.0, below=1.0), default=0.9, metavar="M", help="(default: %(default)s)")
    add(
        "--parallel",
        choices=("data", "auto", "semi-auto"),
        default="data",
        help="data: each rank its shard of the batch (the default); auto, semi-auto: MindSpore cuts the operators, "
        "on Ascend alone",
    )
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and complete the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = 0.01
    if options.device == "auto":
        options.device = "ascend" if ASCEND_DRIVER.exists() else "cpu"
    elif options.device == "ascend" and not ASCEND_DRIVER.exists():
        raise UserError(f"--device ascend: there is no {ASCEND_DRIVER} on this machine: use --device cpu")
    if options.device == "cpu" and options.parallel != "data":
        raise UserError(f"--parallel {options.parallel} needs Ascend, MindSpore has none on CPU: use --parallel data")
    if options.device == "cpu" and os.environ.get("RANK_TABLE_FILE"):
        raise UserError(f"RANK_TABLE_FILE={os.environ['RANK_TABLE_FILE']} is for Ascend: unset it to train on CPU")
    if options.image_size is None:
        options.image_size = IMAGE_SIZES[options.device]
    return options


def read_nodes(options: Options, ranks: int) -> tuple[int, int] | None:
    """For the launch script: the number of machines in the rank table, and which of them, from 0, this one is.

    None where there is no table. Raises UserError for a table that is wrong, or that does not list ``ranks`` devices
    for this machine.
    """
    from each_device import find_place, table_variable  # a rank needs neither

    variable = table_variable(os.environ)
    if variable and options.device == "cpu":
        raise UserError(f"{variable}={os.environ[variable]} is for Ascend: unset it to train on CPU")
    place = find_place(os.environ, ranks)
    return (place.node_count, place.node_rank) if place else None
