"""Define the options of this app, which extend the options that all apps share.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep import ConfigError, env
from samestep.hooks import AppHooks
from samestep.options import (
    MODEL,
    CommonOptions,
    Parser,
    bounded_float,
    dataset_option,
    device_option,
    lr_option,
    make_parser,
    option,
    parse_as,
    threads_option,
    trace_every_option,
    virtual_ranks_option,
)

LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}
# This pattern matches the prefix of a rank's output lines under horovodrun, and mpirun of Open MPI (4, 5) and MPICH.
LINE_PREFIX = r"\[(?:[\w.@-]*,)?\d+\](?:<stderr>:| )\s*"
BUILD_VARIABLE = "HOROVOD_(WITH|GPU|CUDA|NCCL)"  # matches the names of variables that Horovod's build reads
NO_MPI = (
    "--transport mpi: this Horovod was built without MPI: use --transport gloo, or build it, "
    "HOROVOD_WITH_MPI=1 python apps/mnist_horovod/build_horovod.py"
)

fraction = bounded_float(0.0, below=1.0)


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    lr: float = lr_option("0.03 with sgd, 0.001 with adam")
    device: str = device_option("auto", "cpu", "cuda")
    dataset: str = dataset_option("mnist", "fashion-mnist", "mnist-5k")
    virtual_ranks: int | None = virtual_ranks_option()
    threads: int | None = threads_option()
    trace_every: int = trace_every_option()
    model: str = option(
        "net", "network: net with 21,840 parameters, or lenet with 61,610", group=MODEL, choices=("net", "lenet")
    )
    dropout: float = option(0.5, "dropout probability of net", group=MODEL, type=fraction, metavar="P")
    optimizer: str = option("sgd", "optimizer", choices=("sgd", "adam"))
    momentum: float = option(0.9, "momentum of sgd", type=fraction, metavar="M")
    gradients: str = option(
        "group",
        "group sums all gradients after backward, in a fixed order; optimizer is hvd.DistributedOptimizer, which sums "
        "each during backward, so that the last bits of two runs differ from 3 ranks on",
        may_change=True,
        choices=("group", "optimizer"),
    )
    compression: str = option("none", "compression of gradients in the all-reduce", choices=("none", "fp16"))
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))
    transport: str = option(
        None,
        "transport of collectives; mpi starts the ranks by mpirun, and its first start builds Horovod with MPI "
        "(default: gloo, or mpi if mpirun started the ranks)",
        may_change=True,
        choices=("gloo", "mpi"),
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train a small CNN on MNIST with Horovod: every step is the same at any number of ranks, "
        "and a killed run resumes."
    )
    parser = make_parser(Options, description, prog=prog, usage=usage)
    # torch.distributed.launch passes this option, and spells it with an underscore before torch 2.0.
    parser.add_argument("--local-rank", "--local_rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    if vars(options).pop("local_rank", None) is not None:
        raise ConfigError("--local-rank is torch.distributed.launch's, which does not start Horovod: use horovodrun")
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    if not options.transport:
        # Only ranks check for mpirun. The launch script, which sets ``usage``, may itself run in a job of mpirun.
        is_rank_of_mpirun = usage is None and has_mpi_launcher(os.environ)
        options.transport = "mpi" if is_rank_of_mpirun else "gloo"
    if os.environ.get("HOROVOD_HOSTS") == "slurm":
        check_slurm(options, os.environ)
    else:
        check_hosts(os.environ)
    check_virtual_ranks(options)
    return options


def has_mpi_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher started this process."""
    launcher = env.find_launcher(environ)
    return launcher is not None and launcher.kind == "mpi"


def check_slurm(options: Options, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if HOROVOD_HOSTS=slurm cannot start the ranks."""
    if not environ.get("SLURM_JOB_ID"):
        command = "sbatch deploy/slurm/mnist_horovod.sbatch"
        raise ConfigError(f"HOROVOD_HOSTS=slurm, but this is no Slurm job: {command}")
    check_hosts({**environ, "HOROVOD_HOSTS": ""})
    if options.transport != "mpi":
        raise ConfigError("HOROVOD_HOSTS=slurm: mpirun starts the ranks of a Slurm job: add --transport mpi")


def check_virtual_ranks(options: Options) -> None:
    """Raise ConfigError if an option contradicts --virtual-ranks."""
    if options.virtual_ranks and options.compression != "none":
        raise ConfigError("--compression changes the values that ranks exchange: leave it or --virtual-ranks out")
    if options.virtual_ranks and options.gradients != "group":
        raise ConfigError("--gradients optimizer sums whole shards: leave it or --virtual-ranks out")


def setup_environment(options: Options) -> dict[str, str]:
    """Return the variables that control the build of Horovod, for setup.sh."""
    settings = {name: value for name, value in os.environ.items() if re.match(BUILD_VARIABLE, name)}
    if options.transport == "mpi":
        settings["HOROVOD_WITH_MPI"] = "1"
    if settings.get("HOROVOD_WITH_MPI") == "1":
        settings["HOROVOD_MPICXX"] = shutil.which("mpicxx") or ""  # each MPI needs its own build
    return settings


def check_installed(options: Options, ranks: int) -> None:
    """Raise ConfigError if --transport does not work in this environment. The launch script calls this function."""
    if options.transport != "mpi":
        check_name(os.environ)
        return
    from horovod.common.util import mpi_built

    if not mpi_built():
        raise ConfigError(NO_MPI)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which("mpirun", path=path) is None:
        raise ConfigError("--transport mpi: no mpirun on PATH: add the mpirun of the MPI that Horovod was built with")


def check_name(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if HOROVOD_HOSTS has several hosts, and this host's name resolves to a loopback address.

    Horovod's gloo always listens at the address of the host's name, so other hosts could not connect.
    """
    if "," not in environ.get("HOROVOD_HOSTS", ""):
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return
    if address.startswith("127."):
        raise ConfigError(
            f"this host's name, {name}, resolves to {address}, which the other hosts of HOROVOD_HOSTS cannot "
            "reach: give each host an address in /etc/hosts that the others reach, or use --transport mpi"
        )


def check_hosts(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if HOROVOD_HOSTS is malformed, or if a variable requests a launcher per machine.

    horovodrun starts the ranks of all machines from one machine.
    """
    hosts = environ.get("HOROVOD_HOSTS", "")
    for host in hosts.split(","):
        # Each host is a name or an IPv4 address, a colon, and a positive number.
        if hosts and not re.fullmatch(r"[\w.-]+:[1-9]\d{0,4}", host, re.ASCII):
            raise ConfigError(f"HOROVOD_HOSTS={hosts!a} is not a list of host:ranks such as server1:4,server2:4")
    name, count = env.machine_count(environ)
    launcher = env.find_launcher(environ)
    is_rank = launcher is not None and launcher.name == "horovodrun"
    if count not in ("", "1") and not is_rank:
        raise ConfigError(
            f"{name}={count} is not for Horovod, which starts all machines from one: unset it, and for several "
            "machines set HOROVOD_HOSTS=server1:4,server2:4"
        )


HOOKS: AppHooks[Options] = AppHooks(
    line_prefix=LINE_PREFIX, check_installed=check_installed, setup_environment=setup_environment
)
