"""Define the options of this app, which extend the options that all apps share.

The module uses only the standard library and samestep.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from samestep import ConfigError, env
from samestep.hooks import AppHooks
from samestep.options import (
    LOGGING,
    TRAINING,
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
    threads_option,
    virtual_ranks_option,
)

LEARNING_RATES = {"sgd": 0.02, "adam": 0.001}


def gpu_list(text: str) -> str:
    """Return ``text``, which must be a list of distinct GPU numbers.

    Raises:
        ArgumentTypeError: the text is not such a list.
    """
    numbers = text.split(",")
    if not re.fullmatch(r"\d+(,\d+)*", text, re.ASCII) or len(set(numbers)) < len(numbers):
        raise ArgumentTypeError(f"{text!r} is not a list of GPUs such as 0,1")
    return text


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    epochs: int = 20
    global_batch_size: int = 64
    lr: float = lr_option("0.001 with adam, 0.02 with sgd")
    device: str = device_option("auto", "cpu", "gpu")
    dataset: str = dataset_option("mnist", "fashion-mnist", "mnist-5k")
    virtual_ranks: int | None = virtual_ranks_option()
    threads: int | None = threads_option()
    optimizer: str = option("adam", "optimizer", choices=("sgd", "adam"))
    momentum: float = option(0.9, "momentum of sgd", type=bounded_float(0, below=1), metavar="M")
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))
    api: str = option(
        "basic",
        "API: DataParallel (basic), paddle.distributed.fleet, or paddle.Model (highlevel)",
        choices=("basic", "fleet", "highlevel"),
    )
    launcher: str = option(
        "launch",
        "module of paddle.distributed that starts the ranks",
        may_change=True,
        choices=("launch", "spawn"),
    )
    nprocs: int | None = option(
        None,
        "number of ranks with --launcher spawn (default: N of the script; else one per GPU, or per processor)",
        may_change=True,
        type=bounded_int(1),
        metavar="N",
    )
    gpus: str | None = option(
        None,
        "GPUs to use, one per rank, such as 0,1 (default: the first N)",
        may_change=True,
        type=gpu_list,
        metavar="I,J",
    )
    verbose: int = option(
        0,
        "2: paddle.Model's progress lines with --api highlevel, of rank 0's shards",
        group=LOGGING,
        may_change=True,
        type=int,
        choices=(0, 2),
    )
    visualdl: Path | None = option(
        None,
        "folder for VisualDL's loss and accuracy (default: none)",
        group=LOGGING,
        may_change=True,
        type=Path,
        metavar="DIR",
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train LeNet on MNIST with any of PaddlePaddle's three APIs: every step is the same at "
        "any number of ranks, and a killed run resumes."
    )
    parser = make_parser(Options, description, prog=prog, usage=usage)
    parser.group(TRAINING).add_argument("--selected_gpus", type=gpu_list, dest="gpus", help=SUPPRESS)  # as in Paddle 1
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    _, machines = env.machine_count(os.environ)
    if options.launcher == "spawn" and machines not in ("", "1"):
        raise ConfigError("--launcher spawn starts ranks on one machine: use --launcher launch for several")
    if options.virtual_ranks and options.api != "basic":
        raise ConfigError(f"--api {options.api} reduces gradients itself: use basic, or leave --virtual-ranks out")
    if options.verbose and options.api != "highlevel":
        raise ConfigError(f"--verbose {options.verbose} prints paddle.Model's progress: add --api highlevel")
    if options.gpus and options.device == "cpu":
        raise ConfigError(f"--gpus {options.gpus} contradicts --device cpu: leave one of them out")
    if options.gpus:  # with "auto", a machine without GPUs would ignore --gpus
        options.device = "gpu"
    if options.launcher == "spawn" and options.nprocs:
        check_gpus(options, options.nprocs)
    return options


def check_gpus(options: Options, ranks: int | None, local_rank: int = 0) -> None:
    """Raise ConfigError if --gpus is set and does not list a visible GPU for each rank of this machine.

    Args:
        options: options of the app.
        ranks: number of ranks on this machine, or None if it is unknown. If it is None, the list must only be long
            enough for ``local_rank``.
        local_rank: this rank's number on its machine.
    """
    if not options.gpus:
        return
    wanted = options.gpus.split(",")
    visible = visible_gpus()
    if ranks is None and len(wanted) <= local_rank:
        raise ConfigError(f"--gpus {options.gpus} names no GPU for local rank {local_rank}: name one for each rank")
    if ranks is not None and len(wanted) != ranks:
        raise ConfigError(f"--gpus {options.gpus} names {len(wanted)} GPUs for {ranks} ranks: name one for each rank")
    if visible is None:
        return
    hidden = [gpu for gpu in wanted if gpu not in visible]
    if hidden:
        raise ConfigError(
            f"--gpus {options.gpus}: CUDA_VISIBLE_DEVICES={','.join(visible)} hides {','.join(hidden)}: name GPUs that "
            "are in it, or unset it"
        )


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if --gpus or CUDA_VISIBLE_DEVICES does not suit ``ranks`` ranks per machine.

    The launch script calls this function.
    """
    check_gpus(options, ranks)
    visible = visible_gpus()
    if options.launcher == "launch" and visible is not None and max(1, len(visible)) < ranks:
        # The launcher would fail with an IndexError without this check, even with --device cpu.
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} lists {len(visible)} GPUs, and Paddle's launcher gives each of "
            f"{ranks} ranks one of them: start fewer, unset it, or use --launcher spawn"
        )


def setup_environment(options: Options) -> dict[str, str]:
    """Raise ConfigError if the options need GPUs, but the launch script would install the CPU build of Paddle.

    The launch script calls this function before it installs packages. If PYTHON= is set, the script installs nothing,
    and the function raises no error.

    Returns:
        An empty dict, because no variable affects the app's environment.
    """
    if options.device == "gpu" and not os.environ.get("PYTHON"):
        option = f"--gpus {options.gpus}" if options.gpus else "--device gpu"
        raise ConfigError(
            f"{option}: this script would install the CPU build of Paddle: "
            "name an interpreter that has paddlepaddle-gpu by PYTHON=, or leave the option out"
        )
    return {}


def check_installed(options: Options, ranks: int) -> None:
    """Raise ConfigError if --gpus is used with a CPU build, or if Paddle's launcher needs more GPUs than are present.

    The launch script calls this function in the app's environment. The function counts GPUs by Paddle's GPU build, and
    only if the launcher counts them too.
    """
    gpu_build = any(metadata.distributions(name="paddlepaddle-gpu"))
    if options.gpus and not gpu_build:
        raise ConfigError(
            f"--gpus {options.gpus}: this Paddle is the CPU build: install paddlepaddle-gpu, or leave the option out"
        )
    if not gpu_build or not assigns_gpus(options, ranks):
        return
    # Another process counts the GPUs, because Paddle's import replaces the SIGTERM handler of the launch script.
    count = [sys.executable, "-c", "import paddle; print(paddle.device.cuda.device_count())"]
    done = subprocess.run(count, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = 0  # if the import of Paddle fails, a rank will report the error
    words = done.stdout.split()
    if words and words[-1].isdecimal():
        found = int(words[-1])
    if 0 < found < ranks:  # on a machine without GPUs, the launcher assigns none
        raise ConfigError(
            f"this machine has {found} GPUs, and Paddle's launcher gives each of {ranks} ranks one of them: "
            "start fewer, or use --launcher spawn"
        )


def assigns_gpus(options: Options, ranks: int) -> bool:
    """Return whether Paddle's launcher counts the machine's GPUs and assigns one GPU to each rank."""
    if ranks == 1 or options.launcher == "spawn":
        return False
    return not options.gpus and visible_gpus() is None


def visible_gpus() -> list[str] | None:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or None if the variable is unset or "all" (all GPUs)."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if text == "all":
        return None
    return [gpu.strip() for gpu in text.split(",") if gpu.strip()]


HOOKS: AppHooks[Options] = AppHooks(
    may_differ=("gpus",), check_ranks=check_ranks, check_installed=check_installed, setup_environment=setup_environment
)
