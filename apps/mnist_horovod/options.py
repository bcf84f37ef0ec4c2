"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep import ConfigError
from samestep.options import Options, Parser, add_common, bounded_float

LEARNING_RATES = {"sgd": 0.03, "adam": 0.001}
# What horovodrun puts before each line of a rank: itself, Open MPI's mpirun (4, 5), and MPICH's.
LAUNCHER = {"line_prefix": r"\[(?:[\w.@-]*,)?\d+\](?:<stderr>:| )\s*"}
MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # Open MPI's sets the first, MPICH's the second
BUILD_VARIABLE = "HOROVOD_(WITH|GPU|CUDA|NCCL)"  # names that begin so, of what Horovod's build reads
NO_MPI = (
    "--transport mpi: this Horovod was built without MPI: use --transport gloo, or build it, "
    "HOROVOD_WITH_MPI=1 python apps/mnist_horovod/build_horovod.py"
)


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small CNN on MNIST with Horovod: the same global batches at any "
        "number of ranks, exact evaluation, and a run that can be killed and resumed.",
    )
    add_common(
        parser,
        epochs=10,
        global_batch_size=128,
        lr="0.03 with sgd, 0.001 with adam",
        datasets=("mnist", "fashion-mnist", "mnist-5k"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("transport",),
    )
    add = parser.add_argument_group("model and optimizer").add_argument
    add("--model", choices=("net", "lenet"), default="net", help="net: 21,840 parameters (the default); lenet: 61,610")
    add("--dropout", type=bounded_float(0.0, below=1.0), default=0.5, metavar="P", help="in net (default: %(default)s)")
    add("--optimizer", choices=("sgd", "adam"), default="sgd", help="(default: %(default)s)")
    add(
        "--momentum", type=bounded_float(0.0, below=1.0), default=0.9, metavar="M", help="of sgd (default: %(default)s)"
    )
    add(
        "--compression",
        choices=("none", "fp16"),
        default="none",
        help="of gradients on their way (default: %(default)s)",
    )
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64 for comparisons")
    add = parser.add_argument_group("horovod").add_argument
    add(
        "--transport",
        choices=("gloo", "mpi"),
        help="what carries messages between processes; with mpi, the launch script's horovodrun starts them by mpirun, "
        "and its first start builds a Horovod that has it (default: gloo; mpi where an mpirun started the ranks)",
    )
    # torch.distributed.launch gives it beside LOCAL_RANK: by its own name, and before torch 2.0 with an underscore.
    parser.add_argument("--local-rank", "--local_rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and complete the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if vars(options).pop("local_rank", None) is not None:
        raise ConfigError("--local-rank is torch.distributed.launch's, which does not start Horovod: use horovodrun")
    by_slurm = os.environ.get("HOROVOD_HOSTS") == "slurm"
    if by_slurm and not os.environ.get("SLURM_JOB_ID"):
        raise ConfigError("HOROVOD_HOSTS=slurm, but this is no Slurm job: sbatch deploy/slurm/mnist_horovod.sbatch")
    check_hosts({**os.environ, "HOROVOD_HOSTS": ""} if by_slurm else os.environ)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if options.transport is None:
        # Of a rank alone: the launch script, which gives its usage, may stand in a job that sets these for itself.
        by_mpirun = usage is None and "HOROVOD_RANK" not in os.environ and any(name in os.environ for name in MPIRUN)
        options.transport = "mpi" if by_mpirun else "gloo"
    if by_slurm and options.transport != "mpi":
        raise ConfigError("HOROVOD_HOSTS=slurm: mpirun starts the ranks of a Slurm job: add --transport mpi")
    return options


def setup_environment(options: Options) -> dict[str, str]:
    """What decides which Horovod setup.sh builds: the caller's own variables, the transport, and the MPI on PATH."""
    settings = {name: value for name, value in os.environ.items() if re.match(BUILD_VARIABLE, name)}
    if options.transport == "mpi":
        settings["HOROVOD_WITH_MPI"] = "1"
    if settings.get("HOROVOD_WITH_MPI") == "1":
        settings["SAMESTEP_MPICXX"] = shutil.which("mpicxx") or ""  # `module load` of another MPI: another Horovod
    return settings


def check_installed(options: Options, ranks: int) -> None:
    """For the launch script, in the app's environment: raises UserError where it lacks what --transport needs."""
    if options.transport != "mpi":
        check_name(os.environ)
        return
    from horovod.common.util import mpi_built

    if not mpi_built():
        raise ConfigError(NO_MPI)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which("mpirun", path=path) is None:
        raise ConfigError(
            "--transport mpi: there is no mpirun on PATH: put that of the MPI that Horovod was built with there"
        )


def check_name(environ: Mapping[str, str]) -> None:
    """Horovod's gloo listens where the host's name leads, whatever interface horovodrun has found."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if "," in environ.get("HOROVOD_HOSTS", "") and (address := socket.gethostbyname(name)).startswith("127."):
            raise ConfigError(
                f"this host's name, {name}, leads to {address}, which Horovod's gloo would give the other hosts of "
                "HOROVOD_HOSTS for its address: let /etc/hosts lead it to one that they reach, on each host, or use "
                "--transport mpi"
            )


def check_hosts(environ: Mapping[str, str]) -> None:
    """horovodrun starts the ranks of all machines from one, which HOROVOD_HOSTS lists: host:ranks,host:ranks."""
    hosts = environ.get("HOROVOD_HOSTS", "")
    # A name or an address without a colon of its own, and a positive number.
    if hosts and not all(re.fullmatch(r"[\w.-]+:[1-9]\d{0,4}", host, re.ASCII) for host in hosts.split(",")):
        raise ConfigError(f"HOROVOD_HOSTS={hosts!a} is not a list of host:ranks such as server1:4,server2:4")
    nodes = next(
        (name for name in ("NNODES", "PET_NNODES", "WORLD_SIZE") if environ.get(name, "") not in ("", "1")), None
    )
    if nodes and "HOROVOD_RANK" not in environ:
        raise ConfigError(
            f"{nodes}={environ[nodes]} is not for Horovod, which starts all machines from one: unset it, and for "
            "several machines set HOROVOD_HOSTS=server1:4,server2:4"
        )
