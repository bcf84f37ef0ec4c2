"""Run a program on N ranks of this interpreter, restart it after failures, and leave no process behind.

examples:
  samestep run -n 4 train.py --lr 0.1
  samestep run -n 4 --run-dir runs/a train.py          again: a program that writes checkpoints there resumes
  samestep run -n 2 --launcher horovodrun train.py

environment of PROGRAM:
  SAMESTEP_RUN_DIR      the run dir: its checkpoints belong there
  SAMESTEP_RESTARTS     how many starts there were before
  OMP_NUM_THREADS       threads of each rank (default: its share of the processors this job may use)
  and the launcher's RANK, WORLD_SIZE and so on. NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT describe several
  machines; run the same command on each. SAMESTEP_SECRET, or a file SAMESTEP_SECRET_FILE, proves them to each other.

signals: TERM, USR1 and Ctrl-C stop the job; nothing is left running. A program that uses samestep.run.Run saves first.
exit codes: 0 done, 2 a mistake in the call, 128 + the signal that stopped it, 1 anything else
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

from samestep import ConfigError, __version__
from samestep.launch.app import MAX_RANKS, check_arguments, check_run_dir, look_up, run_safely
from samestep.launch.job import Job, node_info, parse_integer, read_nodes, run_job
from samestep.launch.launchers import DIRECT, LAUNCHERS, Launcher
from samestep.options import Parser, bounded_int, seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``samestep`` and return the exit code."""
    return run_safely(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    options = build_parser().parse(argv)
    check_arguments(argv)
    check_run_dir(options.run_dir)
    status, program = look_up("PROGRAM", Path(options.program)), Path(options.program).resolve()
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"PROGRAM {options.program}: there is no such file: name a Python program")
    launcher, nodes = _find_launcher(options.launcher, options.nproc), read_nodes(os.environ)
    # Defaults of the options of `samestep.options.add_common`.
    os.environ.update(SAMESTEP_TIMEOUT=str(options.timeout), SAMESTEP_GRACE=str(options.grace))
    template = [*launcher.command.split(), "{train}", "{arguments}"]
    words = options.nproc, nodes, options, options.arguments, launcher.settings
    job = Job(program.stem, program, template, *words, has_heartbeats=False)
    versions = {"Python": ".".join(map(str, sys.version_info[:2])), "samestep": __version__}
    return run_job(job, node_info(job, program.parent, [program], versions) if nodes.need_preflight else None)


def build_parser() -> Parser:
    """Return the parser of the command ``samestep``."""
    parser = Parser(prog="samestep", description="Run distributed-training programs.")
    parser.add_argument("--version", action="version", version=f"samestep {__version__}")
    summary, _, teaches = str(__doc__).partition("\n\n")
    run = parser.add_subparsers(dest="command", metavar="COMMAND", required=True).add_parser(
        "run",
        help=summary,
        description=summary,
        epilog=teaches,
        usage="samestep run [options] PROGRAM [ARGS...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = run.add_argument
    add("-n", "--nproc", type=_nproc, default=1, metavar="N", help="ranks on this machine (default: 1)")
    without = "(default: torchrun if torch is installed, else none for -n 1)"
    add("--launcher", choices=LAUNCHERS, metavar="NAME", help=f"{', '.join(LAUNCHERS)} {without}")
    add("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/<program>/<UTC time>)")
    add("--max-restarts", type=bounded_int(0), default=3, metavar="R", help="restarts after failures (default: 3)")
    limit = "seconds without progress that end a start, if PROGRAM uses samestep.run.Run (default: 300)"
    add("--timeout", type=seconds, default=300.0, metavar="S", help=limit)
    limit = "seconds from a signal to the end of all processes (default: 30)"
    add("--grace", type=seconds, default=30.0, metavar="S", help=limit)
    add("program", metavar="PROGRAM", help="a Python program; all that follows are its arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    return parser


def _nproc(text: str) -> int:
    return parse_integer("--nproc", text, least=1, most=MAX_RANKS)


def _find_launcher(name: str | None, nproc: int) -> Launcher:
    """Return the launcher to use. Raises ConfigError if it is not installed."""
    if name is None and importlib.util.find_spec("torch") is None:
        if nproc > 1:
            raise ConfigError(f"-n {nproc}: {sys.executable} has no torch: name a --launcher of {', '.join(LAUNCHERS)}")
        return DIRECT
    launcher = LAUNCHERS[name or "torchrun"]
    if launcher.module and importlib.util.find_spec(launcher.module) is None:
        raise ConfigError(f"--launcher {name}: {sys.executable} has no module {launcher.module}: install it there")
    if not launcher.module and shutil.which(name or "") is None:
        raise ConfigError(f"--launcher {name}: there is no {name} on PATH: install it")
    return launcher
