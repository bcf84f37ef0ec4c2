"""What every launch script shares: checks, environment, data, run dir, restarts, signals.

``scripts/run_<app>.sh`` hands over its framework's launcher as a template and the user's arguments::

    launch.sh <app> {python} -m torch.distributed.run --nproc-per-node={nproc} ... {train} {options} -- N [options]

An app's options.py may declare two tables. ``COMMANDS`` (name: what it does): the call takes one of them after N.
``LAUNCHER``, what is particular to the app's launcher::

    line_prefix     a regular expression: what the launcher puts before each line of a rank's stderr
    equal_ranks     whether it wants as many ranks on each machine
    may_differ      names of options that may differ between machines

and functions, which raise UserError: ``check_ranks(options, ranks)`` for what does not suit N ranks on a machine, and
``check_installed(options, ranks)``, in the app's environment, for what that lacks. ``setup_environment(options)`` gives
the variables by which its setup.sh builds; others make another environment. ``find_machines(options, ranks)`` gives the
number of machines and which of them, from 0, this one is, where a file of the app's launcher says so and not the
variables NNODES and so on; else None. ``check_start(options, dataset, step)`` is asked last, when it is known on what
data, and from which step on, the job will train.

An app without ``--resume`` does not train: it has no data set and no checkpoints, and is not started again.

It works in two stages. The first runs on the system's Python with the standard library alone: it reports every mistake
that can be found without the framework, makes ``.venvs/<app>``, and continues in that environment. The second resolves
data, run dir and checkpoint, then starts the launcher, again and again if need be, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from samestep import FatalError, UserError
from samestep.options import Options

from launcher import follower, supervise, venvs
from launcher.supervise import read_text, say
from launcher.venvs import ROOT

if TYPE_CHECKING:
    from launcher.meeting import Card, Met

HELP = """\
N is the number of ranks on this machine. The first start makes .venvs/{app}{prepares}; the next ones start at once.
{recovers}
  --dry-run             print the launcher's command and stop

environment:
  PYTHON                use this interpreter, which must have what the app pins, and install nothing
  OMP_NUM_THREADS       threads of each rank (default: its share of the processors this job may use)
  NNODES, NODE_RANK     several machines: how many, and which one this is, from 0; run the script on each
  MASTER_ADDR, MASTER_PORT  several machines: an address of machine 0, and a free port there
                        (PET_* and, with NPROC_PER_NODE or N, RANK and WORLD_SIZE that count machines are understood)

{stops}exit codes: 0 done, 2 a mistake in the call, 128 + the signal that stopped it, 1 anything else
"""


STOP_HELP = """\
signals: TERM, USR1 and Ctrl-C, to this script or to any rank: all ranks agree on a step, save it and end; a second
signal, or --grace seconds, end them at once

"""


# Options of which each machine may have its own.
MAY_DIFFER = ("data_dir", "init_from", "quiet", "requested_dataset", "run_dir")
# Seconds in which a machine that will not start again tells the others; LONG where they may not yet have noticed.
SHORT, LONG = 10.0, 60.0


@dataclass(frozen=True)
class Nodes:
    """The machines of a job: how many, which one this is, and their rendezvous (None: on one machine, or elsewhere)."""

    count: int
    rank: int
    master_addr: str | None
    master_port: int | None

    @property
    def meet(self) -> bool:
        """Whether their launch scripts are to find each other before they start anything."""
        return self.count > 1 and self.master_addr is not None


@dataclass(frozen=True)
class Job:
    """What to start on this machine: an app's launcher, the words for its ranks, and how many of them."""

    app: str
    template: Sequence[str]
    nproc: int
    nodes: Nodes
    options: Options
    arguments: Sequence[str]  # options, as they were given

    @property
    def trains(self) -> bool:
        return hasattr(self.options, "resume")

    def command(self, python: str, port: int, logs: Path, *more: str, met: Met | None = None) -> list[str]:
        """The launcher's command. A word of the template that names what is not given is left out.

        ``met`` is what several machines know of each other when they start.
        """
        host = None if self.nodes.count > 1 else "127.0.0.1"
        values = {
            **vars(self.options),
            "python": python,
            "nproc": self.nproc,
            "nnodes": self.nodes.count,
            "node_rank": self.nodes.rank,
            "host": met.address if met else host,
            "master_addr": met.master if met else self.nodes.master_addr or "127.0.0.1",
            "master_port": port,
            "world_size": sum(met.ranks) if met else self.nproc * self.nodes.count,
            "log_dir": logs,
            "app": ROOT / "apps" / self.app,
            "train": ROOT / "apps" / self.app / "train.py",
        }
        command: list[str] = []
        for word in self.template:
            if word == "{options}":
                command += [*self.arguments, *more]
            elif all(values[name] is not None for _, name, _, _ in Formatter().parse(word) if name):
                command.append(word.format(**values))
        return command


def main(argv: Sequence[str]) -> int:
    second_stage = os.environ.pop("SAMESTEP_SECOND_STAGE", "") != ""
    for name in ("LAUNCHER", "ERRORS", "JOB", "RESTARTS", "RANKS", "MACHINES"):  # of a job by which this is started
        os.environ.pop(f"SAMESTEP_{name}", None)
    supervise.stop_on_signals()
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
    except supervise.Stopped as stopped:
        return 128 + stopped.number


def _main(app: str, template: Sequence[str], arguments: list[str], second_stage: bool) -> int:
    module = _app_options(app)
    usage = f"bash scripts/run_{app}.sh N{' COMMAND' if hasattr(module, 'COMMANDS') else ''} [options]"
    if "--help" in arguments or "-h" in arguments:
        parser = module.build_parser(usage=usage)
        print(parser.help_for(arguments) + "\n" + _help(app, parser.get_default("resume") is not None), end="")
        return 0
    nproc, arguments = _ranks_per_node(arguments, usage)
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    options = module.parse(arguments, usage=usage)
    if hasattr(module, "check_ranks"):
        module.check_ranks(options, nproc)
    placed = module.find_machines(options, nproc) if hasattr(module, "find_machines") else None
    nodes = Nodes(placed[0], placed[1], None, None) if placed else read_nodes(os.environ)
    _check_paths(options)
    trackers = [] if getattr(options, "track", None) is None else follower.names_of(options.track)

    job = Job(app, template, nproc, nodes, options, arguments)
    if dry_run:
        python = os.environ.get("PYTHON") or str(venvs.folder(app) / "bin" / "python")
        logs = (options.run_dir or Path("runs", app, "UTC-TIME")) / "log"
        print(shlex.join(job.command(python, nodes.master_port or 29500, logs)))
        return 0
    if not second_stage:
        settings = module.setup_environment(options) if hasattr(module, "setup_environment") else {}
        python = venvs.given_python() or venvs.ensure(app, settings)
        os.environ["SAMESTEP_SECOND_STAGE"] = "1"
        sys.stdout.flush()
        os.execv(python, [python, *sys.argv])
    venvs.check_requirements(app)
    if hasattr(module, "check_installed"):
        module.check_installed(options, nproc)
    if not trackers or nodes.rank > 0 or options.evaluate_only:  # metrics.jsonl is written on machine 0, by a training
        return _resolve_and_run(job, module)
    return _resolve_and_run(job, module, follower.Follower(trackers, follower.find_python(trackers)))


def _help(app: str, trains: bool) -> str:
    recovers = "A job that fails is started again and resumes from its newest checkpoint.\n"
    return HELP.format(
        app=app,
        prepares=" and prepares the data" if trains else "",
        recovers=recovers if trains else "",
        stops=STOP_HELP if trains else "",
    )


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
    if port and rank == 0 and not supervise.port_is_free(port):
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
    """The app's options.py as a module; it needs only the standard library, samestep and files of its own folder."""
    path = ROOT / "apps" / app / "options.py"
    spec = importlib.util.spec_from_file_location("app_options", path)
    if spec is None or spec.loader is None or not path.exists():
        known = sorted(folder.parent.name for folder in ROOT.glob("apps/*/options.py"))
        near = difflib.get_close_matches(app, known, n=1)
        raise UserError(
            f"there is no app {app}; " + (f"did you mean {near[0]}?" if near else f"apps: {', '.join(known)}")
        )
    sys.path.append(str(path.parent))  # behind all else: apps give their files plain names
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_paths(options: Options) -> None:
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


# --- the job, in the app's environment ---------------------------------------------------------------------------


def _resolve(job: Job, module: Any) -> dict[str, Any]:
    """Resolve run dir, data set and checkpoint, once for all machines; ``module`` is the app's options.py."""
    from samestep import rundir

    if job.nodes.rank > 0:  # of machines that a file lists: the first resolves the rest, and its rank 0 broadcasts
        job.options.run_dir = (job.options.run_dir or rundir.new(job.app)).resolve()
        rundir.make_folder(job.options.run_dir / "log")
        return {}
    given: Path | None = job.options.run_dir
    run_dir = given or rundir.new(job.app)
    job.options.run_dir = run_dir.resolve()
    plan: dict[str, Any] = {"run_dir": str(run_dir)}
    if job.trains:
        found = rundir.resolve(job.app, job.options, verify=False)
        lock = found.lock
        if hasattr(module, "check_start"):
            module.check_start(job.options, found.dataset, found.checkpoint.step if found.checkpoint else 0)
        plan |= {"dataset": found.dataset, "fingerprint": found.fingerprint, "requested": found.requested_dataset}
    else:
        _, lock = rundir.claim(job.app, job.options.run_dir)
    _check_log(job)
    lock.release(rundir.WRITER_BYTE)  # rank 0's from here on; the launcher's byte is held until this process ends
    return plan


def _check_log(job: Job) -> None:
    """Raises UserError where this machine cannot write to the run dir: all are to hear of it before anything starts."""
    try:
        (job.options.run_dir / "log" / "launcher.log").open("ab").close()
    except OSError as problem:
        raise UserError(f"cannot write to {job.options.run_dir}: {problem.strerror}: name another place") from None


def _card(job: Job, module: Any) -> Card:
    """What this machine says of itself to the others."""
    from samestep import __file__ as package
    from samestep.options import as_json

    from launcher.meeting import Card, digests

    options = as_json(job.options)
    differ = {*MAY_DIFFER, *getattr(module, "LAUNCHER", {}).get("may_differ", ())}
    app = ROOT / "apps" / job.app
    code = [*app.glob("*.py"), *Path(package).parent.glob("*.py"), *Path(__file__).parent.glob("*.py")]
    return Card(
        app=job.app,
        machine=job.nodes.rank,
        machines=job.nodes.count,
        ranks=job.nproc,
        options={name: value for name, value in options.items() if name not in differ},
        files=digests(ROOT, [*code, *(ROOT / "scripts").glob(f"run_{job.app}.sh")]),
        versions=venvs.versions(job.app),
    )


def _meet(job: Job, module: Any, card: Card, resolve: Callable[[], Mapping[str, Any]]) -> Met:
    """Wait for the job's other machines. What is resolved for all, the others than machine 0 look after here."""
    from samestep import datasets, rundir

    from launcher import meeting

    def prepare(plan: Mapping[str, Any]) -> None:
        job.options.run_dir = Path(job.options.run_dir or plan["run_dir"]).resolve()
        rundir.make_folder(job.options.run_dir / "log")
        _check_log(job)
        if "dataset" in plan:
            resolve_dataset = job.options.resolve_dataset or datasets.resolve
            here = resolve_dataset(plan["dataset"], job.options.data_dir, fallback=False)
            if here.fingerprint != plan["fingerprint"]:
                raise UserError(
                    f"its {here.name} in {here.folder.resolve()} is not machine 0's (SHA-256 "
                    f"{str(here.fingerprint)[:12]}, there {str(plan['fingerprint'])[:12]}): put the same files there"
                )

    assert job.nodes.master_addr is not None  # see Nodes.meet
    assert job.nodes.master_port is not None
    return meeting.meet(
        card,
        job.nodes.master_addr,
        job.nodes.master_port,
        job.options.timeout,
        lambda: {**resolve(), "job": uuid.uuid4().hex},
        prepare,
        equal_ranks=getattr(module, "LAUNCHER", {}).get("equal_ranks", False),
    )


@dataclass
class Started:
    """What came of a job so far: its name at the last start, "" before the first; its ranks' verdict there."""

    job: str = ""
    verdict: int | None = None


def _resolve_and_run(job: Job, module: Any, tracks: follower.Follower | None = None) -> int:
    """Run the job. On several machines the others hear of its end here, or they would wait for this one.

    ``tracks`` gives its numbers to trackers.
    """
    card = _card(job, module) if job.nodes.meet else None
    started, words, new, code = Started(), "", job.options.run_dir is None, 1
    try:
        code = _start(job, module, card, started, tracks)
        if code == 0:
            words = "has finished"
        elif code < 128:  # and at a signal all ranks have heard of it
            words = f"has ended with code {code}: see what it says there"
        return code
    except supervise.Stopped as stopped:
        code = 128 + stopped.number
        if started.verdict is None:
            words = f"was stopped by signal {stopped.number}"
        raise
    except (UserError, FatalError):  # of a meeting, which has told all
        raise
    except BaseException:
        words = "has failed: see what it says there"
        raise
    finally:
        if new and not started.job and job.options.run_dir:  # nothing has begun: leave nothing
            shutil.rmtree(job.options.run_dir, ignore_errors=True)
        if card and started.job and words:
            from launcher import meeting

            with contextlib.suppress(supervise.Stopped):
                address, port = str(job.nodes.master_addr), int(job.nodes.master_port or 0)
                knows_alone = started.verdict is not None  # else the others have seen what this one has seen
                meeting.part(replace(card, after=started.job), address, port, words, LONG if knows_alone else SHORT)
        if tracks:
            tracks.finish(stopped=code > 128)


def _start(job: Job, module: Any, card: Card | None, started: Started, tracks: follower.Follower | None = None) -> int:
    """Start the launcher on what has been resolved, and again after a failure; return the script's exit code."""
    line_prefix = getattr(module, "LAUNCHER", {}).get("line_prefix", "")
    max_restarts = job.options.max_restarts if job.trains else 0
    grace = job.options.grace if job.trains else supervise.STOP_SECONDS
    resolve = functools.cache(lambda: _resolve(job, module))  # at the first start
    stepped = False  # did any start do an update?
    for attempt in range(max_restarts + 1):
        met = _meet(job, module, replace(card, after=started.job), resolve) if card else None
        plan = met.plan if met else resolve()
        started.job = plan.get("job") or uuid.uuid4().hex
        resolved = []
        if job.nodes.rank == 0 and "dataset" in plan:  # its rank 0 tells the others
            resolved = ["--resume", f"--dataset={plan['dataset']}", f"--requested-dataset={plan['requested']}"]
        run_dir: Path = job.options.run_dir
        logs, see = run_dir / "log", f"see {run_dir}/log/launcher.log and rank-*.log"
        stop_hint = f": the ranks save a step; again, to end at once; --run-dir={run_dir} resumes" if job.trains else ""
        if job.nodes.rank == 0:  # machines may share the run dir
            for name in ("no-restart", "stalled", "stack-0.txt"):  # what an earlier start left
                (logs / name).unlink(missing_ok=True)
        if tracks:
            tracks.start(run_dir)
        environ = supervise.environment(started.job, job.nproc, job.nodes.count, attempt, met.address if met else None)
        try:
            with supervise.reserved_port(job.nodes.master_port) as port:
                command = job.command(sys.executable, port, logs, f"--run-dir={run_dir}", *resolved, met=met)
                code = supervise.run_once(command, environ, logs, line_prefix, stop_hint, grace)
        finally:
            started.verdict = _verdict(logs, started.job)
        # msrun says 0 when it has killed its ranks at a Ctrl-C. A rank that ends well takes its stacks away.
        if code == 0 and not (job.trains and job.nodes.rank == 0 and (logs / "stack-0.txt").exists()):
            return 0
        if started.verdict is not None:
            return started.verdict
        if -code in supervise.STOPS:  # its launcher was stopped: no failure
            return 128 - code
        from samestep import hang  # not before something has failed

        ended = f"the job ended with code {code}" + hang.crashes(logs, started.job, ROOT / "apps" / job.app)
        stepped = stepped or _made_a_step(logs, started.job)
        if attempt == 1 and not stepped:  # one such failure may be chance; what fails so twice fails each time
            say(f"error: the job failed twice before its first step: {see}")
            return 1
        if attempt < max_restarts:
            again = f"starting it again ({attempt + 1} of {max_restarts})"
            say(f"warning: {ended}; {again}, logs in {logs}")
    after = f" after {max_restarts} restarts" if max_restarts else ""
    say(f"error: {ended}{after}: {see}")
    return 1


def _verdict(logs: Path, job: str) -> int | None:
    """The exit code that a rank of this start left, where starting again cannot help."""
    verdict = json.loads(read_text(logs / "no-restart") or "{}")
    return int(verdict["code"]) if "code" in verdict and verdict.get("job") in (None, job) else None


def _made_a_step(logs: Path, job: str) -> bool:
    """Whether any rank of this machine did an update in this start, by the heartbeats that ranks leave."""
    for path in logs.glob("alive-*"):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # a damaged one says nothing
            heartbeat = json.loads(path.read_text())
            if heartbeat.get("job") == job and heartbeat.get("updates", 0) > 0:
                return True
    return False
