"""Define the options of this app, which extend the options that all apps share.

The module uses only the standard library and samestep.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    seconds,
    virtual_ranks_option,
)

ASCEND_DRIVER = Path("/dev/davinci_manager")  # exists if Ascend's driver is installed, even in a container
TABLE_VARIABLES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")  # MindSpore reads both variables
FEATURES = {10: 512, 18: 512, 50: 2048}  # inputs of the last layer
TRAIN_EXAMPLES = {"cifar10": 50_000, "synthetic-cifar10": 1_024}
# Defaults of --image-size (pixels) and --first-step-timeout (seconds, long because Ascend's compiler needs minutes).
DEFAULTS = {"ascend": (224, 1800.0), "cpu": (32, 300.0)}


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    global_batch_size: int = 32
    lr: float = lr_option("0.01", 0.01)
    dtype: str = "float32"  # MindSpore's convolutions on the CPU support only this type
    device: str = device_option("auto", "cpu", "ascend")
    dataset: str = dataset_option("cifar10", "synthetic-cifar10")
    virtual_ranks: int | None = virtual_ranks_option(refusal="MindSpore compiles its reduction into the step")
    depth: int = option(50, "depth of the ResNet", group=MODEL, type=int, choices=(10, 18, 50))
    image_size: int = option(
        None,
        "image size in pixels (default: 32, on Ascend 224)",
        group=MODEL,
        type=bounded_int(8),
        metavar="S",
    )
    freeze_bn: bool = option(False, "normalize by the stored statistics, also in training", group=MODEL)
    loss: str = option("expand", "cross-entropy in small operators, or MindSpore's own", choices=("expand", "builtin"))
    momentum: float = option(0.9, "momentum", type=bounded_float(0.0, below=1.0), metavar="M")
    drop_remainder: bool | None = option(  # None, because older checkpoints do not have this option
        None,
        "omit the samples of an epoch that do not fill a global batch (default: a smaller last batch)",
        action="store_true",
    )
    api: str = option(
        "functional",
        "API: the app's own loop (functional), or mindspore.train.Model (highlevel)",
        may_change=True,
        choices=("functional", "highlevel"),
    )
    sink_size: int = option(
        1,
        "steps per loop on the device (dataset_sink_mode); must divide an epoch and every interval; the CPU cannot "
        "sink data: MindSpore reads each batch from memory there",
        may_change=True,
        type=bounded_int(1),
        metavar="S",
    )
    parallel: str = option(
        "data",
        "parallelism: of the batch (data), of the batch and the last layer's weights (semi-auto), or as MindSpore's "
        "search cuts the operators (auto: AUTO_PARALLEL); semi-auto and auto are experimental and need Ascend, and the "
        "app refuses them on CPU",
        choices=("data", "semi-auto", "auto"),
    )
    first_step_timeout: float | None = option(
        None,
        "--timeout in seconds for the first step, which compiles (default: 300, on Ascend 1800, at least --timeout)",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=seconds,
        metavar="T",
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train ResNet on CIFAR-10 with MindSpore: with --freeze-bn, every step is the same at any number of ranks. "
        "A killed run resumes."
    )
    return make_parser(Options, description, prog=prog, usage=usage)


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    if options.device == "auto":
        options.device = automatic_device()
    elif options.device == "ascend" and not ASCEND_DRIVER.exists():
        raise ConfigError(f"--device ascend: there is no {ASCEND_DRIVER} on this machine: use --device cpu")
    if options.parallel != "data":
        check_parallel(options)
    if os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1":
        raise ConfigError("MS_COMPILER_CACHE_ENABLE=1: the cache leaves the running statistics as they are: unset it")
    image_size, first_step_timeout = DEFAULTS[options.device]
    options.image_size = options.image_size or image_size
    options.first_step_timeout = options.first_step_timeout or max(first_step_timeout, options.timeout)
    check_loops(options)
    return options


def automatic_device() -> str:
    """Return the device of --device auto.

    Raises:
        ConfigError: a variable selects a rank table on a machine without Ascend.
    """
    if ASCEND_DRIVER.exists():
        return "ascend"
    name = table_variable(os.environ)
    if name:
        raise ConfigError(
            f"{name}={os.environ[name]} is for Ascend: unset it, or rehearse its job on CPU with --device cpu"
        )
    return "cpu"


def check_parallel(options: Options) -> None:
    """Raise ConfigError if --parallel semi-auto or auto does not work with --device, or with --sink-size and --api."""
    parallel = f"--parallel {options.parallel}"
    if options.device == "cpu":
        raise ConfigError(f"{parallel} needs Ascend, because MindSpore on CPU lacks it: use --parallel data")
    if options.api == "functional" and options.sink_size > 1:
        # MindSpore's AutoParallel supports data sinking only in `Model`.
        raise ConfigError(f"{parallel} sinks with MindSpore's Model alone: add --api highlevel, or drop --sink-size")


def check_loops(options: Options, more: Mapping[str, int] | None = None) -> None:
    """Raise ConfigError if an action would be due within a loop of --sink-size updates.

    Args:
        options: options of the app.
        more: further steps at which a loop must end, counted from the start of training, by name.
    """
    due = {
        "--log-every": options.log_every,
        "--checkpoint-every": options.checkpoint_every,
        "--evaluate-every": options.evaluate_every,
        "--max-steps": options.max_steps or 0,
        **(more or {}),
    }
    for name, steps in due.items():
        if steps % options.sink_size:
            raise ConfigError(
                f"--sink-size {options.sink_size} does not divide {name} {steps}: something would be "
                f"due within a loop; choose a divisor of {math.gcd(*due.values())}"
            )


def check_steps(options: Options, train_examples: int, start: int) -> None:
    """Raise ConfigError if the options do not suit the number of examples, or the step ``start`` of a resume."""
    from samestep.sharding import GlobalBatches  # needs NumPy, which the launch script's first stage does not have

    size = options.global_batch_size
    drops = bool(options.drop_remainder)
    if drops and train_examples < size:
        raise ConfigError(f"--drop-remainder leaves none of {train_examples} samples: lower --global-batch-size")
    steps_per_epoch = GlobalBatches(train_examples, size, seed=0, drop_last=drops).steps_per_epoch
    check_loops(options, {"the steps of an epoch": steps_per_epoch, "the step to resume at": start})


def check_start(options: Options, dataset: str, start: int) -> None:
    """Call `check_steps` with the number of training examples of ``dataset``. The launch script calls this function."""
    if dataset in TRAIN_EXAMPLES:  # the ranks check other datasets
        check_steps(options, TRAIN_EXAMPLES[dataset], start)


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if the options do not suit ``ranks`` ranks.

    The launch script passes the ranks of one machine, and a rank passes the world size. For n values, batch
    normalization divides by n - 1. The last layers have one pixel for each 32 x 32 pixels of an image.
    """
    if options.parallel != "data" and ranks == 1:
        raise ConfigError(f"--parallel {options.parallel} cannot cut for 1 rank: use --parallel data, or more ranks")
    features = FEATURES.get(options.depth, 0)  # 0: unknown, so MindSpore itself checks it
    if options.parallel == "semi-auto" and features % ranks:
        raise ConfigError(f"--parallel semi-auto cannot cut {features} features into {ranks}: choose a divisor as N")
    size = options.global_batch_size
    pixels = options.image_size
    takes_statistics = not options.freeze_bn and not options.evaluate_only
    if takes_statistics and size <= ranks and pixels <= 32:
        raise ConfigError(
            f"--global-batch-size {size} leaves each of {ranks} ranks one image of {pixels} x {pixels}, one pixel in "
            f"the last layers, whose variance batch normalization cannot estimate: give more than {ranks}, or "
            "--image-size above 32, or --freeze-bn"
        )


def table_variable(environ: Mapping[str, str]) -> str | None:
    """Return the environment variable that contains the path of a rank table, or None if both variables are unset.

    Raises:
        ConfigError: the variables contain different paths.
    """
    given = [name for name in TABLE_VARIABLES if environ.get(name)]
    if len({os.path.abspath(environ[name]) for name in given}) > 1:
        tables = " and ".join(f"{name}={environ[name]}" for name in given)
        raise ConfigError(f"{tables} are two tables: unset one of them")
    if not given:
        return None
    return given[0]


def find_machines(options: Options, ranks: int) -> tuple[int, int] | None:
    """Return the number of machines in the rank table and this machine's number (from 0), or None without a table.

    The launch script calls this function.

    Raises:
        ConfigError: the table is invalid, does not list ``ranks`` devices for this machine, or contradicts NNODES or
            NODE_RANK.
    """
    variable = table_variable(os.environ)
    if not variable:
        return None
    from placement import find_placement  # not at the top, because ranks do not need it

    placement = find_placement(variable, os.environ, ranks)
    return placement.node_count, placement.node_rank


HOOKS: AppHooks[Options] = AppHooks(
    equal_ranks=True,  # msrun numbers the ranks of a machine from NODE_RANK * N
    check_ranks=check_ranks,
    find_machines=find_machines,
    check_start=check_start,
)
