"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from samestep import UserError
from samestep.options import Options, Parser, add_common, real, whole

LAUNCHER = {"may_differ": ("gpus",)}
LEARNING_RATES = {"sgd": 0.02, "adam": 0.001}


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train LeNet on MNIST with PaddlePaddle, by any of its three APIs: the same global batches at any "
        "number of ranks, exact evaluation, and a run that can be killed and resumed.",
    )
    add_common(
        parser,
        epochs=20,
        global_batch_size=64,
        lr="0.001 with adam, 0.02 with sgd",
        datasets=("mnist", "fashion-mnist", "mnist-5k"),
        devices=("auto", "cpu", "gpu"),
        may_change_at_resume=("gpus", "launcher", "nprocs", "visualdl"),
    )
    add = parser.add_argument_group("model and optimizer").add_argument
    add("--optimizer", choices=("sgd", "adam"), default="adam", help="(default: %(default)s)")
    add("--momentum", type=real(0.0, below=1.0), default=0.9, metavar="M", help="of sgd (default: %(default)s)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64 for comparisons")
    add = parser.add_argument_group("paddle").add_argument
    add(
        "--api",
        choices=("basic", "fleet", "highlevel"),
        default="basic",
        help="basic: DataParallel in a loop of our own (the default); fleet: distributed_model and "
        "distributed_optimizer in the same loop; highlevel: paddle.Model's fit and evaluate",
    )
    add(
        "--launcher",
        choices=("launch", "spawn"),
        default="launch",
        help="who starts the ranks: paddle.distributed.launch (the default), or train.py by paddle.distributed.spawn",
    )
    add(
        "--nprocs",
        type=whole(1),
        metavar="N",
        help="ranks that --launcher spawn starts (the launch script: N; bare train.py: one for each of --gpus, else "
        "for each visible GPU, else for each processor that this process may use)",
    )
    add("--gpus", type=gpu_list, metavar="I,J", help="the GPUs to use, one a rank, such as 0,1 (default: the first N)")
    add("--visualdl", type=Path, metavar="DIR", help="write loss and accuracy there, for the visualdl command")
    return parser


def gpu_list(text: str) -> str:
    """An option's type: numbers of GPUs, each once."""
    numbers = text.split(",")
    if not re.fullmatch(r"\d+(,\d+)*", text, re.ASCII) or len(set(numbers)) < len(numbers):
        raise ArgumentTypeError(f"{text!r} is not a list of GPUs such as 0,1")
    return text


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and complete the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if options.launcher == "spawn" and os.environ.get("NNODES", "1") != "1":
        raise UserError("--launcher spawn starts ranks on one machine: use --launcher launch for several")
    if options.gpus and options.device == "cpu":
        raise UserError(f"--gpus {options.gpus} contradicts --device cpu: leave one of them out")
    if options.gpus:  # else they could be ignored, where ``auto`` finds none
        options.device = "gpu"
    if options.launcher == "spawn" and options.nprocs:
        check_gpus(options, options.nprocs)
    return options


def check_gpus(options: Options, ranks: int | None, local_rank: int = 0) -> None:
    """Raises UserError unless --gpus, where it is given, names a visible GPU for each of a machine's ranks.

    Where their number is not known (None), for ``local_rank``.
    """
    if not options.gpus:
        return
    wanted, visible = options.gpus.split(","), visible_gpus()
    if ranks is None and len(wanted) <= local_rank:
        raise UserError(f"--gpus {options.gpus} names no GPU for local rank {local_rank}: name one for each rank")
    if ranks is not None and len(wanted) != ranks:
        raise UserError(f"--gpus {options.gpus} names {len(wanted)} GPUs for {ranks} ranks: name one for each rank")
    hidden = [] if visible is None else [each for each in wanted if each not in visible]
    if hidden:
        raise UserError(
            f"--gpus {options.gpus}: CUDA_VISIBLE_DEVICES={','.join(visible or [])} hides {','.join(hidden)}: "
            "name GPUs that are in it, or unset it"
        )


def check_ranks(options: Options, ranks: int) -> None:
    """For the launch script: raises UserError where N ranks on a machine do not suit the GPUs that are named."""
    check_gpus(options, ranks)
    visible = visible_gpus()
    if options.launcher == "launch" and visible is not None and max(1, len(visible)) < ranks:
        # It fails by an IndexError, also where the ranks are to compute on the CPU.
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} lists {len(visible)} GPUs, and Paddle's launcher gives each of "
            f"{ranks} ranks one of them: start fewer, unset it, or use --launcher spawn"
        )


def check_installed(options: Options, ranks: int) -> None:
    """For the launch script, in the app's environment: raises UserError for more ranks than GPUs, as check_ranks does.

    Only the GPU build of Paddle can count GPUs, and only where no variable lists them is that needed.
    """
    listed = options.gpus or visible_gpus() is not None
    if ranks == 1 or options.launcher == "spawn" or listed or not installed("paddlepaddle-gpu"):
        return
    # In a process of its own: Paddle takes over SIGTERM when it is imported, and the launch script needs that.
    count = [sys.executable, "-c", "import paddle; print(paddle.device.cuda.device_count())"]
    output = subprocess.run(count, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()
    found = int(output[-1]) if output and output[-1].isdecimal() else 0  # a Paddle that fails will say so in a rank
    if 0 < found < ranks:  # without any, the launcher does not deal them out
        raise UserError(
            f"this machine has {found} GPUs, and Paddle's launcher gives each of {ranks} ranks one of them: "
            "start fewer, or use --launcher spawn"
        )


def installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def visible_gpus() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; None where it is not set, or hides none in Paddle's reading."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return None if text == "all" else [each.strip() for each in text.split(",") if each.strip()]
