"""Define the options of this app: those that every app has, and its own.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from samestep import ConfigError
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

TORCHVISION = "torchvision==0.28.0"  # for --input torchvision; the app's locks leave it out
LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small CNN on MNIST with PyTorch DistributedDataParallel: every step is the same at any "
        "number of ranks, and a killed run resumes.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=128,
        lr="0.03 with sgd, 0.001 with adam",
        datasets=("mnist", "fashion-mnist", "mnist-5k"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("input", "backend", "log_format"),
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
    backends = f"library for collectives; auto: nccl on GPUs, gloo on CPUs {default}"
    add("--backend", choices=("auto", "gloo", "nccl"), default="auto", help=backends)
    inputs = "source of training batches: a tensor of all images, or torchvision's MNIST and a DataLoader; losses are "
    add = parser.group("Data").add_argument
    add("--input", choices=("memory", "torchvision"), default="memory", help=f"{inputs}equal {default}")
    add = parser.group("Logging and tracking").add_argument
    formats = f"lines of log/rank-<r>.log: time and text, or full: level|time|path|line| text {default}"
    add("--log-format", choices=("plain", "full"), default="plain", help=formats)
    parser.add_argument("--gpu", dest="device", action="store_const", const="cuda", help="the same as --device cuda")
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in. Raises ConfigError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if options.backend == "nccl" and options.device == "cpu":
        raise ConfigError("--backend nccl needs GPUs: use --device cuda, or --backend gloo")
    return options


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if the environment that the launch script would make cannot serve the options."""
    if os.environ.get("PYTHON"):
        return
    if options.input == "torchvision" and "torchvision" not in Path(__file__).with_name("requirements.in").read_text():
        cifar = "`bash scripts/run_cifar_ddp.sh 1 --max-steps 0` makes .venvs/cifar_ddp/bin/python"
        raise ConfigError(f"--input torchvision: name a Python with torch and {TORCHVISION} by PYTHON=; {cifar}")
    has_driver = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi")
    if options.backend == "nccl" and not has_driver:
        raise ConfigError("--backend nccl: this machine has no NVIDIA driver: use --backend gloo")
