"""Run a program on N ranks, restart it after failures, and leave no process behind.

examples:
  samestep run -n 4 train.py --lr 0.1
  samestep run -n 4 --run-dir runs/a train.py    # the same command resumes
  samestep run -n 2 --launcher horovodrun train.py

environment of PROGRAM:
  SAMESTEP_RUN_DIR    directory for the program's checkpoints
  SAMESTEP_RESTARTS   number of earlier starts of this job
  OMP_NUM_THREADS     threads per rank (default: an equal share of the
                      processors that this job may use)
  The launcher adds RANK, WORLD_SIZE and so on. For several machines, run the
  same command on each with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, and
  share a secret by SAMESTEP_SECRET or the file SAMESTEP_SECRET_FILE.

signals: TERM, USR1 or Ctrl-C stops the job and all its processes. The ranks
receive the same signal. A program that uses samestep.run.Run first saves a
checkpoint. With --preemption-notice, the notice of a cloud provider does the
same as TERM.

exit codes: 0 done, 1 a failure, 2 a mistake in the call,
128 + n stopped by signal n
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep import ConfigError, __version__
from samestep.env import Launcher, startable_launchers
from samestep.hooks import AppHooks
from samestep.options import (
    EXEC,
    FORK,
    GROUPS,
    Parser,
    add_preemption_notice,
    add_start_method,
    bounded_int,
    path,
    seconds,
)

from samestep_launch import program as programs
from samestep_launch.app import MAX_RANKS, check_arguments, check_notice, check_run_dir, leave, look_up, run_safely
from samestep_launch.imports import check_imports
from samestep_launch.job import Job, node_info, parse_integer, read_nodes, run_job, warn_of_other_ranks
from samestep_launch.machine import check_interface

LAUNCHERS = startable_launchers()


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the command ``samestep run`` and exit with its exit code."""
    leave(run_safely(lambda: _main(arguments)))


def _main(arguments: Sequence[str]) -> int:
    check_arguments(arguments)
    options = build_parser().parse(arguments)
    check_run_dir(options.run_dir)
    check_notice(options)
    status = look_up("PROGRAM", Path(options.program))
    program = Path(options.program).resolve()
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"PROGRAM {options.program}: the file is missing: name a Python program")
    if options.start_method == FORK:
        _check_fork(options.launcher, program)
    nodes = read_nodes(os.environ)
    launcher = _find_launcher(options.launcher, options.nproc, machines=nodes.count)
    check_interface(os.environ)
    check_imports()
    warn_of_other_ranks(os.environ, nodes)
    command = "{python}"  # one process
    hooks: AppHooks[Any] = AppHooks()
    if launcher:
        command = launcher.command
        hooks = AppHooks(line_prefix=launcher.line_prefix, equal_ranks=launcher.equal_ranks)
    job = Job(
        name=program.stem,
        program=program,
        template=[*command.split(), "{train}", "{arguments}"],
        nproc=options.nproc,
        nodes=nodes,
        options=options,
        arguments=options.arguments,
        hooks=hooks,
        has_heartbeats=False,
    )
    node = None
    if nodes.need_preflight:
        python = ".".join(map(str, sys.version_info[:2]))
        versions = {"Python": python, "samestep": __version__}
        node = node_info(job, program.parent, code=[program], versions=versions)
    return run_job(job, node)


def build_parser() -> Parser:
    """Return the parser of ``samestep run``."""
    summary, _, details = str(__doc__).partition("\n\n")
    usage = "samestep run [options] PROGRAM [ARGS...]"
    parser = Parser(prog="samestep run", usage=usage, description=summary, epilog=details)
    add = parser.add_argument
    add("-n", "--nproc", type=_nproc, default=1, metavar="N", help="number of ranks on this machine (default: 1)")
    without = "(default: torchrun if torch is installed, else none for -n 1)"
    add("--launcher", choices=LAUNCHERS, metavar="NAME", help=f"launcher: {', '.join(LAUNCHERS)} {without}")
    add = parser.group(GROUPS[2]).add_argument
    add("--run-dir", type=path, metavar="DIR", help="directory of the run (default: runs/<program>/<UTC time>)")
    add = parser.group(GROUPS[3]).add_argument
    add_start_method(parser, EXEC)
    limit = "maximum number of restarts after failures (default: 3)"
    add("--max-restarts", type=bounded_int(0), default=3, metavar="R", help=limit)
    limit = "seconds without progress after which a job that uses samestep.run.Run ends as hung (default: 300)"
    add("--timeout", type=seconds, default=300.0, metavar="T", help=limit)
    limit = "seconds from a stop signal until the job is killed (default: 30)"
    add("--grace", type=seconds, default=30.0, metavar="T", help=limit)
    add_preemption_notice(parser)
    add = parser.add_argument
    add("program", metavar="PROGRAM", help="Python program; the words after it are its arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    return parser


def _nproc(text: str) -> int:
    return parse_integer("--nproc", text, least=1, most=MAX_RANKS)


def _check_fork(launcher: str | None, program: Path) -> None:
    """Raise ConfigError if ``--start-method fork`` cannot start this program."""
    if launcher not in (None, "torchrun"):
        raise ConfigError(f"--start-method fork needs torchrun, not --launcher {launcher}: use --start-method exec")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--start-method fork needs torchrun, but {sys.executable} has no torch: install it there")
    programs.check(program)


def _find_launcher(name: str | None, nproc: int, machines: int) -> Launcher | None:
    """Return the launcher to use; None for one process without a launcher.

    Args:
        name: the value of --launcher, or None.
        nproc: number of ranks on this machine.
        machines: number of machines.

    Raises:
        ConfigError: the launcher is not installed or starts ranks only on its own machine, or several ranks need a
            launcher but ``name`` and torch are missing.
    """
    suitable = [each for each, launcher in LAUNCHERS.items() if machines == 1 or "{node_rank}" in launcher.command]
    if name is None and importlib.util.find_spec("torch") is None:
        if nproc > 1 or machines > 1:
            several = f"-n {nproc}" if nproc > 1 else f"{machines} machines"
            raise ConfigError(f"{several}: {sys.executable} has no torch: name a --launcher of {', '.join(suitable)}")
        return None
    name = name or "torchrun"
    if name not in suitable:
        remedy = f"use --launcher {' or '.join(suitable)}, or {name} itself with its list of hosts"
        raise ConfigError(f"--launcher {name} starts ranks on one machine, but the job has {machines}: {remedy}")
    launcher = LAUNCHERS[name]
    if launcher.module and importlib.util.find_spec(launcher.module) is None:
        raise ConfigError(f"--launcher {name}: {sys.executable} has no module {launcher.module}: install it there")
    if launcher.program and shutil.which(launcher.program) is None:
        raise ConfigError(f"--launcher {name}: {launcher.program} is not on PATH: install it")
    return launcher
