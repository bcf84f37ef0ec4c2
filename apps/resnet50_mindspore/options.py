"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from samestep import UserError
from samestep.options import Options, Parser, add_common, real, whole

ASCEND_DRIVER = Path("/dev/davinci_manager")  # there wherever Ascend's driver is, also in a container
IMAGE_SIZES = {"ascend": 224, "cpu": 32}
FIRST_STEP_TIMEOUTS = {"ascend": 1800.0, "cpu": 300.0}  # seconds: Ascend's compiler takes many minutes


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
        may_change_at_resume=("api", "sink_size", "first_step_timeout"),
    )
    parser.set_defaults(dtype="float32")  # MindSpore's convolutions on CPU know no other
    add = parser.add_argument_group("model and optimizer").add_argument
    add("--depth", type=int, choices=(18, 50), default=50, help="of the ResNet (default: %(default)s)")
    add("--image-size", type=whole(8), metavar="S", help="images are resized to S x S (default: 32, on Ascend 224)")
    add("--freeze-bn", action="store_true", help="batch normalisation by its stored statistics, also in training")
    add("--loss", choices=("expand", "builtin"), default="expand", help="of small operators, or MindSpore's own")
    add("--momentum", type=real(0.0, below=1.0), default=0.9, metavar="M", help="(default: %(default)s)")
    add(
        "--drop-remainder",
        action="store_true",
        help="leave out of each epoch the samples that fill no global batch (default: a smaller last one)",
    )
    add = parser.add_argument_group("mindspore").add_argument
    add(
        "--api",
        choices=("functional", "highlevel"),
        default="functional",
        help="functional: value_and_grad in a loop of our own (the default); highlevel: mindspore.train.Model",
    )
    add(
        "--sink-size",
        type=whole(1),
        default=1,
        metavar="S",
        help="updates in a loop, between which nothing is due: on Ascend they run from data that wait on the device; "
        "S must divide --log-every, --checkpoint-every and the steps of an epoch (default: %(default)s)",
    )
    add(
        "--first-step-timeout",
        type=real(0.0, above=True),
        metavar="T",
        help="as --timeout, until the first step is done, which is compiled (default: 300, on Ascend 1800)",
    )
    add(
        "--parallel",
        choices=("data", "auto"),
        default="data",
        help="data: each rank its shard of the batch (the default); auto, experimental, on Ascend alone: MindSpore "
        "chooses how to cut the operators, and a run whose weights it would cut is refused",
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
    if options.parallel == "auto":
        _check_auto(options)
    if options.device == "cpu" and os.environ.get("RANK_TABLE_FILE"):
        raise UserError(f"RANK_TABLE_FILE={os.environ['RANK_TABLE_FILE']} is for Ascend: unset it to train on CPU")
    if options.image_size is None:
        options.image_size = IMAGE_SIZES[options.device]
    if options.first_step_timeout is None:
        options.first_step_timeout = FIRST_STEP_TIMEOUTS[options.device]
    for name in ("log_every", "checkpoint_every", "max_steps"):
        check_loops(options.sink_size, f"--{name.replace('_', '-')}", getattr(options, name) or 0)
    return options


def _check_auto(options: Options) -> None:
    """Refuse what cannot work under AutoParallel. Raises UserError."""
    if options.device == "cpu":
        raise UserError("--parallel auto needs Ascend, MindSpore has none on CPU: use --parallel data")
    if options.api == "highlevel" or options.sink_size > 1:
        raise UserError(
            "--parallel auto takes --api functional and --sink-size 1 alone: MindSpore's AutoParallel knows no sinking "
            "in a loop of our own, and Model was not tried with it"
        )


def check_loops(sink_size: int, name: str, steps: int) -> None:
    """Refuse loops of ``sink_size`` updates in which something would be due before the end. Raises UserError."""
    if steps % sink_size:
        divisors = ", ".join(str(size) for size in range(1, min(sink_size, steps) + 1) if steps % size == 0)
        raise UserError(
            f"--sink-size {sink_size} does not divide {name} {steps}: something would be due within a loop; choose one "
            f"of {divisors}"
        )


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
