"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep import ConfigError
from samestep.options import Options, Parser, add_common, bounded_float, bounded_int

# msrun numbers the ranks of a machine from NODE_RANK * N.
LAUNCHER = {"equal_ranks": True}
ASCEND_DRIVER = Path("/dev/davinci_manager")  # there wherever Ascend's driver is, also in a container
IMAGE_SIZES = {"ascend": 224, "cpu": 32}
TABLE_VARIABLES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")  # MindSpore reads both
TRAIN_EXAMPLES = {"cifar10": 50_000, "synthetic-cifar10": 1_024}
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
        resume_mutable=("api", "sink_size", "first_step_timeout"),
    )
    parser.set_defaults(dtype="float32")  # MindSpore's convolutions on CPU know no other
    add = parser.add_argument_group("model and optimizer").add_argument
    add("--depth", type=int, choices=(18, 50), default=50, help="of the ResNet (default: %(default)s)")
    add("--image-size", type=bounded_int(8), metavar="S", help="images are resized to S x S (default: 32, on Ascend 224)")
    add("--freeze-bn", action="store_true", help="batch normalisation by its stored statistics, also in training")
    add("--loss", choices=("expand", "builtin"), default="expand", help="of small operators, or MindSpore's own")
    add("--momentum", type=bounded_float(0.0, below=1.0), default=0.9, metavar="M", help="(default: %(default)s)")
    add(
        "--drop-remainder",
        action="store_true",
        default=None,  # as in the checkpoints of before there was this option
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
        type=bounded_int(1),
        default=1,
        metavar="S",
        help="updates in a loop, between which nothing is due: on Ascend they run from data that wait on the device; "
        "S must divide --log-every, --checkpoint-every, --evaluate-every and an epoch's steps (default: %(default)s)",
    )
    add(
        "--first-step-timeout",
        type=bounded_float(0.0, above=True),
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
        raise ConfigError(f"--device ascend: there is no {ASCEND_DRIVER} on this machine: use --device cpu")
    if options.parallel == "auto":
        _check_auto(options)
    for name in TABLE_VARIABLES:
        if options.device == "cpu" and os.environ.get(name):
            raise ConfigError(f"{name}={os.environ[name]} is for Ascend: unset it to train on CPU")
    if os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1":
        raise ConfigError(
            "MS_COMPILER_CACHE_ENABLE=1: a step that MindSpore 2.10 takes from its cache leaves the running statistics "
            "as they are: unset it"
        )
    if options.image_size is None:
        options.image_size = IMAGE_SIZES[options.device]
    if options.first_step_timeout is None:
        options.first_step_timeout = max(FIRST_STEP_TIMEOUTS[options.device], options.timeout)
    check_loops(options)
    return options


def _check_auto(options: Options) -> None:
    """Refuse what cannot work under AutoParallel. Raises UserError."""
    if options.device == "cpu":
        raise ConfigError("--parallel auto needs Ascend, MindSpore has none on CPU: use --parallel data")
    if options.api == "highlevel" or options.sink_size > 1:
        raise ConfigError(
            "--parallel auto takes --api functional and --sink-size 1 alone: MindSpore's AutoParallel knows no sinking "
            "in a loop of our own, and Model was not tried with it"
        )


def check_loops(options: Options, more: Mapping[str, int] | None = None) -> None:
    """Refuse loops of --sink-size updates in which something would be due before the end. Raises UserError.

    ``more`` is what else a loop must not go beyond, in steps from the start of training, by what it is called.
    """
    due = {"--log-every": options.log_every, "--checkpoint-every": options.checkpoint_every}
    due |= {"--evaluate-every": options.evaluate_every, "--max-steps": options.max_steps or 0, **(more or {})}
    for name, steps in due.items():
        if steps % options.sink_size:
            raise ConfigError(
                f"--sink-size {options.sink_size} does not divide {name} {steps}: something would be "
                f"due within a loop; choose a divisor of {math.gcd(*due.values())}"
            )


def check_steps(options: Options, train_examples: int, start: int) -> None:
    """What a run of ``train_examples`` from step ``start`` on must fulfil. Raises UserError."""
    from samestep.sharding import GlobalBatches  # not the standard library's alone, as the first stage is

    size, drops = options.global_batch_size, bool(options.drop_remainder)
    if drops and train_examples < size:
        raise ConfigError(f"--drop-remainder leaves none of {train_examples} samples: lower --global-batch-size")
    steps_per_epoch = GlobalBatches(train_examples, size, seed=0, drop_last=drops).steps_per_epoch
    check_loops(options, {"the steps of an epoch": steps_per_epoch, "the step to resume at": start})


def check_start(options: Options, dataset: str, start: int) -> None:
    """For the launch script, which knows by now what the run trains on, and from which step on. Raises UserError."""
    check_steps(options, TRAIN_EXAMPLES[dataset], start)


def check_ranks(options: Options, ranks: int) -> None:
    """For the launch script: refuse what does not suit as many ranks on a machine. Raises UserError."""
    if options.parallel == "auto" and ranks == 1:
        raise ConfigError("--parallel auto has nothing to cut for 1 rank: use --parallel data, or more ranks")


def find_machines(options: Options, ranks: int) -> tuple[int, int] | None:
    """For the launch script: the number of machines in the rank table, and which of them, from 0, this one is.

    None where there is no table. Raises UserError for a table that is wrong, or that does not list ``ranks`` devices
    for this machine.
    """
    from each_device import find_place  # a rank does not need it

    place = find_place(os.environ, ranks)
    return (place.node_count, place.node_rank) if place else None
