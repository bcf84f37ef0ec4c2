"""What every launch script shares: checks, environment, data, run dir, restarts, signals.

``scripts/run_<app>.sh`` hands over its framework's launcher as a template and the user's arguments::

    launch.py <app> {python} -m torch.distributed.run --nproc-per-node={nproc} ... {train} {options} -- N [options]

An app whose options.py declares ``COMMANDS`` (name: what it does) takes one of them after N. An app without
``--resume`` does not train: it has no data set and no checkpoints to settle, and is not started again.

It works in two stages. The first runs on the system's Python with the standard library alone: it tells every mistake
that can be told without the framework, makes ``.venvs/<app>``, and continues in that environment. The second settles
data, run dir and checkpoint, then starts the launcher, again and again if need be, and leaves no process behind.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # started as a file: make this package and core importable, not this file's folder
    root = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(root / "scripts"), str(root / "core")]

from launcher import venvs
from samestep import FatalError, UserError
from launcher.supervise import Stopped, port_is_free, read_text, reserved_port, run_once, say, stop_on_signals
from launcher.venvs import ROOT, make_folder

if TYPE_CHECKING:
    from argparse import Namespace

    from samestep.checkpoint import Checkpoint


HELP = """\
N is the number of ranks on this machine. The first start makes .venvs/{app}{prepares}; the next ones start at once.
{recovers}
  --dry-run             print the launcher's command and stop

environment:
  PYTHON                use this interpreter as it is and install nothing
  OMP_NUM_THREADS       threads of each rank (default: its share of the processors this job may use)
  NNODES, NODE_RANK     several machines: how many, and which one this is, from 0; run the script on each
  MASTER_ADDR, MASTER_PORT  several machines: an address of machine 0, and a free port there
                        (PET_* and, with NPROC_PER_NODE or N, RANK and WORLD_SIZE that count machines are understood)

exit codes: 0 done, 2 a mistake in the call, 130 and 143 stopped by Ctrl-C and TERM, 1 anything else
"""


@dataclass(frozen=True)
class Nodes:
    """The machines of a job: how many, which one this is, and where they meet (None on one machine)."""

    count: int
    rank: int
    master_addr: str | None
    master_port: int | None


@dataclass(frozen=True)
class Settled:
    """What is decided once, before the ranks start: run dir, data set, and the checkpoint to resume from."""

    run_dir: Path
    dataset: str
    requested_dataset: str
    checkpoint: Checkpoint | None


def main(argv: Sequence[str]) -> int:
    second_stage = os.environ.pop("SAMESTEP_SECOND_STAGE", "") != ""
    stop_on_signals()
    try:
        app, arguments = argv[0], list(argv[1:])
        split = arguments.index("--")
        template, arguments = arguments[:split], arguments[split + 1 :]
        return _main(app, template, arguments, second_stage)
    except UserError as problem:
        say(f"error: {problem}")
        return 2
    except FatalError as problem:
        say(f"error: {problem}")
        return 1
    except Stopped as stopped:
        return 128 + stopped.number


def _main(app: str, template: Sequence[str], arguments: list[str], second_stage: bool) -> int:
    module = _app_options(app)
    usage = f"bash scripts/run_{app}.sh N{' COMMAND' if hasattr(module, 'COMMANDS') else ''} [options]"
    if "--help" in arguments or "-h" in arguments:
        parser = module.build_parser(usage=usage)
        print(parser.help_for(arguments) + "\n" + _help(app, parser.get_default("resume") is not None), end="")
        return 0
    nproc, arguments = _ranks_per_node(arguments, usage)
    nodes = read_nodes(os.environ)
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    options = module.parse(arguments, usage=usage)
    trains = hasattr(options, "resume")
    _check_paths(options)

    if dry_run:
        python = os.environ.get("PYTHON") or str(venvs.folder(app) / "bin" / "python")
        port = nodes.master_port or 29500
        logs = (options.run_dir or Path("runs", app, "UTC-TIME")) / "log"
        print(shlex.join(_command(template, app, python, nproc, nodes, port, logs, arguments, options)))
        return 0
    if not second_stage:
        python = venvs.given_python() or venvs.ensure(app)
        os.environ["SAMESTEP_SECOND_STAGE"] = "1"
        sys.stdout.flush()
        os.execv(python, [python, __file__, *sys.argv[1:]])

    venvs.check_requirements(app)
    if nodes.rank > 0:  # machine 0 settles; its rank 0 tells the others
        run_dir = options.run_dir or _new_run_dir(app)
        (run_dir / "log").mkdir(parents=True, exist_ok=True)
        return _supervise(template, app, nproc, nodes, [*arguments, f"--run-dir={run_dir.resolve()}"], options, run_dir)
    from samestep import log

    made = None if options.run_dir else _new_run_dir(app)
    options.run_dir = options.run_dir or made
    try:
        settled = settle(app, options) if trains else None
        run_dir = settled.run_dir if settled else _settle_run_dir(app, options.run_dir)
    except BaseException:
        if made:  # nothing has begun: leave nothing
            shutil.rmtree(made, ignore_errors=True)
        raise
    log.unlock(log.WRITER_BYTE)  # rank 0's from here on
    arguments.append(f"--run-dir={run_dir}")
    if settled:
        arguments += ["--resume", f"--dataset={settled.dataset}", f"--requested-dataset={settled.requested_dataset}"]
    return _supervise(template, app, nproc, nodes, arguments, options, run_dir)


def _help(app: str, trains: bool) -> str:
    recovers = "A job that fails is started again and resumes from its newest checkpoint.\n"
    return HELP.format(
        app=app, prepares=" and prepares the data" if trains else "", recovers=recovers if trains else ""
    )


def settle(app: str, options: Namespace, fresh: bool = True) -> Settled:
    """Decide run dir, data set and checkpoint, and lock the run dir; the launch script calls this, then rank 0.

    ``fresh`` is False in a process that a launcher started again: --no-resume then no longer applies.
    Raises UserError when the run dir holds another run, FatalError when none of its checkpoints is good.
    """
    from samestep import checkpoint, datasets, log
    from samestep.options import arithmetic

    run_dir = _settle_run_dir(app, options.run_dir or _run_dir_of_this_job(app))
    found = None
    if options.resume or not fresh:
        found = checkpoint.newest(run_dir, log.warning)
    else:
        checkpoint.set_aside(run_dir)

    asked = options.requested_dataset or options.dataset  # None: the user named none
    if found:  # a resumed run keeps its data set
        recorded, asked_before = found.arithmetic.get("dataset"), found.state.get("requested_dataset")
        same = asked in (None, recorded, asked_before)
        checkpoint.check_same_run(found, app, {**arithmetic(options), "dataset": recorded if same else asked})
        checkpoint.retire_newer(found)
        source = datasets.resolve(str(recorded), options.data_dir, fallback=False)
        return Settled(run_dir, source.name, asked_before or asked or source.name, found)
    source = datasets.resolve(options.dataset or options.default_dataset, options.data_dir)
    if source.notice:
        log.warning(source.notice)
    return Settled(run_dir, source.name, asked or options.default_dataset, None)


def _settle_run_dir(app: str, run_dir: Path) -> Path:
    """Make the run dir and lock it; returns it as an absolute path."""
    from samestep import log

    run_dir = run_dir.resolve()
    make_folder(run_dir / "log")
    under_script = "SAMESTEP_LAUNCHER" in os.environ
    for byte in (log.WRITER_BYTE,) if under_script else (log.LAUNCHER_BYTE, log.WRITER_BYTE):
        log.lock(run_dir, byte, f"{app}, started by {Path(sys.argv[0]).name}")
    return run_dir


def read_nodes(environ: Mapping[str, str]) -> Nodes:
    """Which machine of how many, from NNODES and NODE_RANK, PET_*, or RANK and WORLD_SIZE that count machines.

    A Kubernetes Indexed Job gives the machine's number as JOB_COMPLETION_INDEX. Raises UserError.
    """

    def first(*names: str) -> tuple[str, str]:
        return next(((name, environ[name]) for name in names if environ.get(name)), (names[0], ""))

    machines = first("NNODES", "PET_NNODES", "WORLD_SIZE")
    if not machines[1] and environ.get("RANK"):
        raise UserError(f"RANK={environ['RANK']} is set but WORLD_SIZE is not: set both (machines), or neither")
    name, text = first("NODE_RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    if not machines[1] and text not in ("", "0"):
        raise UserError(f"{name}={text} is set but NNODES is not: set it to the number of machines")
    count = _integer(*machines, default=1, least=1)
    if count == 1:
        rank, addr = 0, None
    else:
        name, text = first("NODE_RANK", "PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX")
        if not text:
            raise UserError(f"{count} machines, but NODE_RANK is not set: set it to this machine's number, from 0")
        rank = _integer(name, text, least=0)
        if rank >= count:
            raise UserError(f"{name}={text} is not below the number of machines, {count}")
        addr = first("MASTER_ADDR", "PET_MASTER_ADDR")[1]
        if not addr:
            raise UserError(f"{count} machines, but MASTER_ADDR is not set: set it to an address of machine 0")
    name, text = first("MASTER_PORT", "PET_MASTER_PORT")
    if count > 1 and not text:
        raise UserError(
            f"{count} machines, but MASTER_PORT is not set: choose a free port of machine 0, the same on all"
        )
    port = _integer(name, text, least=1, most=65535) if text else None
    if port and rank == 0 and not port_is_free(port):
        raise UserError(f"{name}={port} is in use on this machine: choose another, or unset it to have one chosen")
    return Nodes(count, rank, addr, port)


def _integer(name: str, text: str, least: int, most: int | None = None, default: int | None = None) -> int:
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least or (most is not None and int(text) > most):
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise UserError(f"{name}={text} is not a whole number {limit}")
    return int(text)


def _ranks_per_node(arguments: list[str], usage: str) -> tuple[int, list[str]]:
    if arguments and not arguments[0].startswith("--"):
        name, text, rest = "N", arguments[0], arguments[1:]
    else:
        name = next((n for n in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE") if os.environ.get(n)), "")
        text, rest = os.environ.get(name, ""), arguments
        if not text:
            example = usage.replace(" N", " 4").replace(" COMMAND", " all").replace(" [options]", "")
            raise UserError(f"N, the number of ranks, is missing: {usage}, for example: {example}")
    return _integer(name, text, least=1), rest


def _app_options(app: str) -> Any:
    """The app's options.py as a module; it needs only the standard library and samestep."""
    path = ROOT / "apps" / app / "options.py"
    spec = importlib.util.spec_from_file_location("app_options", path)
    if spec is None or spec.loader is None or not path.exists():
        known = sorted(folder.parent.name for folder in ROOT.glob("apps/*/options.py"))
        near = difflib.get_close_matches(app, known, n=1)
        raise UserError(
            f"there is no app {app}; " + (f"did you mean {near[0]}?" if near else f"apps: {', '.join(known)}")
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_paths(options: Namespace) -> None:
    for name in ("data_dir", "run_dir"):
        path = getattr(options, name, None)
        if path is not None and path.exists() and not path.is_dir():
            raise UserError(f"--{name.replace('_', '-')} {path} is not a directory: name a directory")
    path = getattr(options, "init_from", None)
    if path is None:
        return
    if not path.is_file():
        raise UserError(f"--init-from {path}: there is no such file")
    # A safetensors file starts with its header's length (8 bytes, little-endian) and the header in JSON.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= path.stat().st_size else b""
    if not header.startswith(b"{"):
        raise UserError(f"--init-from {path} is not a safetensors file: name a run's model.safetensors")


def _command(
    template: Sequence[str],
    app: str,
    python: str,
    nproc: int,
    nodes: Nodes,
    port: int,
    logs: Path,
    arguments: Sequence[str],
    options: Namespace,
) -> list[str]:
    """The launcher's command. A word of the template that names what is not given is left out."""
    values = {
        **vars(options),
        "python": python,
        "nproc": nproc,
        "nnodes": nodes.count,
        "node_rank": nodes.rank,
        "host": None if nodes.count > 1 else "127.0.0.1",  # several machines have names of their own
        "master_addr": nodes.master_addr or "127.0.0.1",
        "master_port": port,
        "world_size": nproc * nodes.count,
        "log_dir": logs,
        "app": ROOT / "apps" / app,
        "train": ROOT / "apps" / app / "train.py",
    }
    command: list[str] = []
    for word in template:
        if word == "{options}":
            command += arguments
        elif all(values[name] is not None for _, name, _, _ in Formatter().parse(word) if name):
            command.append(word.format(**values))
    return command


# --- the run dir -------------------------------------------------------------------------------------------------


def _new_run_dir(app: str, suffix: str = "") -> Path:
    from samestep.checkpoint import make_unique

    folder = Path("runs", app, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + suffix)
    try:
        return make_unique(folder)
    except OSError as problem:
        raise UserError(f"cannot make {folder.resolve()}: {problem.strerror}: name another with --run-dir") from problem


def _run_dir_of_this_job(app: str) -> Path:
    """Under a bare launcher: a new run dir, found again by the ranks that the same launcher starts anew.

    Its name carries a key: the launcher's own id of the job, or the launcher's process.
    """
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    slurm = os.environ.get("SLURM_JOB_ID")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or "0"
    key = elastic if elastic != "none" else f"slurm-{slurm}" if slurm else f"{socket.gethostname()}-{os.getppid()}"
    suffix = "-" + hashlib.sha256(key.encode()).hexdigest()[:8]
    earlier = sorted(Path("runs", app).glob(f"*{suffix}"))
    return earlier[-1] if earlier and restarts != "0" else _new_run_dir(app, suffix)


# --- the job -----------------------------------------------------------------------------------------------------


def _supervise(
    template: Sequence[str],
    app: str,
    nproc: int,
    nodes: Nodes,
    arguments: Sequence[str],
    options: Namespace,
    run_dir: Path,
) -> int:
    """Start the launcher, and again after a failure; return the script's exit code."""
    logs = run_dir / "log"
    max_restarts = getattr(options, "max_restarts", 0)
    for attempt in range(max_restarts + 1):
        (logs / "no-restart").unlink(missing_ok=True)
        with reserved_port(nodes.master_port) as port:
            command = _command(template, app, sys.executable, nproc, nodes, port, logs, arguments, options)
            resumes = f"; --run-dir={run_dir} resumes" if hasattr(options, "resume") else ""
            code = run_once(command, nproc, nodes.count == 1, attempt, logs / "launcher.log", resumes)
        if code == 0:
            return 0
        verdict = read_text(logs / "no-restart")
        if verdict is not None:
            return int(json.loads(verdict)["code"])
        if attempt < max_restarts:
            again = f"starting it again ({attempt + 1} of {max_restarts})"
            say(f"warning: the job ended with code {code}; {again}, logs in {logs}")
    after = f" after {max_restarts} restarts" if max_restarts else ""
    say(f"error: the job ended with code {code}{after}: see {logs}/launcher.log and rank-*.log")
    return 1


if __name__ == "__main__":
    from launcher.launch import main as package_main  # the package's own classes, not this file's second copy

    sys.exit(package_main(sys.argv[1:]))
