"""Start an app of this project: check the call, create the app's environment, and run the job by `job.run_job`.

``scripts/run_<app>.sh`` calls ``launch.sh`` with a template of the framework's launcher command, and the user's
arguments::

    launch.sh <app> {python} -m torch.distributed.run --nproc-per-node={nproc} ... {train} {options} -- N [options]

An app's options.py defines the functions ``parse`` and ``build_parser``, and ``HOOKS``, an instance of
`samestep.hooks.AppHooks`. An app without ``--resume`` does not train: the app has neither dataset nor checkpoints, and
does not restart.

A start has two stages. The first stage runs on the system's Python without third-party packages. This stage reports
mistakes in the call that can be found without the framework, creates ``.venvs/<app>``, and runs the second stage in
that environment. The second stage resolves data, run dir and checkpoint, starts the launcher, restarts the launcher
after failures, and leaves no process behind.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from samestep import ConfigError, NonRetryableError, env
from samestep.hooks import AppHooks
from samestep.job_info import leave_job
from samestep.options import Options, check_virtual_ranks
from samestep.untrusted import MAX_LINE, open_closed_streams, read_text, shown

from samestep_launch import environments, supervise, trackers
from samestep_launch.environments import Environment
from samestep_launch.imports import check_imports
from samestep_launch.job import Job, Nodes, node_info, parse_integer, read_nodes, run_job, warn_of_other_ranks
from samestep_launch.machine import check_interface
from samestep_launch.supervise import print_stderr

DRY_RUN = "--dry-run"
SECOND_STAGE = "--second-stage"  # scripts/launch.py has the same constant
MAX_RANKS = 10**5  # maximum number of ranks on one machine
SURROGATES = "\ud800-\udfff"  # surrogates, to which Python decodes bytes that are not UTF-8
# The characters that a name must not contain: control characters, line separators and surrogates.
UNUSABLE = re.compile(f"[\0-\x1f\x7f-\x9f\u2028\u2029{SURROGATES}]")

# Modules of samestep that version 0.3 moved or removed.
OLD_MODULES = (
    *("launch", "observe", "check", "autopsy", "report", "track", "watch"),
    *("recovery.events", "torch.options", "torch.run"),
)

HELP = """\
N is the number of ranks on this machine. The first start installs packages into
.venvs/{app}{prepares}; later starts are quick.{recovers}

examples:
{examples}

environment:
  PYTHON              interpreter that has the app's pinned packages; with it
                      nothing is installed
  OMP_NUM_THREADS     threads per rank (default: an equal share of the
                      processors that this job may use)
  NNODES, NODE_RANK   for several machines: their number, and this machine's
                      index from 0; run the script on each
  MASTER_ADDR, MASTER_PORT
                      for several machines: machine 0's address, and a free port
                      there
  SAMESTEP_SECRET, SAMESTEP_SECRET_FILE
                      for several machines: a secret that all share, or a file
                      with it that only you can read; it keeps other programs
                      from joining or stopping the job
  PET_* has the same effect, and so do RANK and WORLD_SIZE if they count
  machines and NPROC_PER_NODE or N is given.

{stops}exit codes: 0 done, 1 a failure, 2 a mistake in the call,
128 + n stopped by signal n
"""
STOP_HELP = """\
signals: TERM, USR1 or Ctrl-C, to this script or to any rank, stops all ranks at
one step and saves it. A second signal, or the end of --grace, kills them. With
--preemption-notice, the notice of a cloud provider does the same as TERM.

"""


def main(root: Path, argv: Sequence[str]) -> int:
    """Run an app and return the exit code.

    Args:
        root: the project's folder.
        argv: the app's name, the words of its template, --, and the user's arguments. In the second stage,
            `SECOND_STAGE` precedes the name.
    """
    words = list(argv)
    is_second_stage = words[:1] == [SECOND_STAGE]
    if is_second_stage:
        del words[0]
    split = [*words, "--"].index("--")  # without "--", all words are the name and the template
    name, *template = words[:split] or [""]
    return run_safely(lambda: _main(root, name, template, words[split + 1 :], is_second_stage))


def run_safely(run: Callable[[], int]) -> int:
    """Call ``run``, print an expected error, and return the exit code.

    This process may be part of another job, so the function first removes that job's environment variables.

    Returns:
        The result of ``run``; 2 for a ConfigError, 1 for a NonRetryableError, and 128 + n after signal n.
    """
    open_closed_streams()
    leave_job(os.environ)
    supervise.stop_on_signals()
    try:
        return run()
    except (ConfigError, NonRetryableError) as error:
        print_stderr(shown(f"error: {error}", limit=MAX_LINE))
        return error.exit_code
    except supervise.Stopped as stopped:
        return 128 + stopped.number


def leave(code: int) -> NoReturn:
    """Print what is left in the buffers, and exit at once.

    Threads of this process may wait for messages of other machines. They can crash Python's orderly end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the console is closed
            stream.flush()
    os._exit(code)


def _main(root: Path, name: str, template: Sequence[str], arguments: list[str], is_second_stage: bool) -> int:
    check_name("the project's folder", root)
    if os.pathsep in str(root):
        raise ConfigError(f"the project's folder {root} has a {os.pathsep}, which ends a folder on PATH: rename it")
    check_arguments(arguments)
    if not is_second_stage:
        _check_old_modules(root / "apps" / name)
    app = App(root, name, module=_app_options(root, name), environment=Environment(root, name))
    if "--help" in arguments or "-h" in arguments:
        _print_help(app, arguments)
        return 0
    job = _parse_call(app, template, [argument for argument in arguments if argument != DRY_RUN])
    if DRY_RUN in arguments:
        _print_command(app, job)
        return 0
    if not is_second_stage:
        _exec_second_stage(app, job.options)  # this call does not return: the second stage begins with `main` again
    return _run(app, job)


@dataclass(frozen=True)
class App:
    """An app of a project.

    Attributes:
        root: the project's folder.
        name: the app's name.
        module: the imported options.py of the app.
        environment: the app's Python environment, which may not exist yet.
    """

    root: Path
    name: str
    module: Any
    environment: Environment

    @property
    def folder(self) -> Path:
        """Return the folder with train.py."""
        return self.root / "apps" / self.name

    @property
    def usage(self) -> str:
        """Return the usage line of the app's script."""
        if self.hooks.commands:
            return f"bash scripts/run_{self.name}.sh N COMMAND [options]"
        return f"bash scripts/run_{self.name}.sh N [options]"

    @property
    def hooks(self) -> AppHooks[Any]:
        """Return the app's hooks."""
        hooks: AppHooks[Any] = self.module.HOOKS
        return hooks


# --- both stages -----------------------------------------------------------------------------------------------------


def _parse_call(app: App, template: Sequence[str], arguments: list[str]) -> Job:
    """Return the job that the command line describes.

    Raises:
        ConfigError: the command line has a mistake that can be found without the framework.
    """
    nproc, arguments = _ranks_per_node(app, arguments)
    options = app.module.parse(arguments, usage=app.usage)
    check_virtual_ranks(options, nproc)
    app.hooks.check_ranks(options, nproc)
    machines = app.hooks.find_machines(options, nproc)
    if machines is None:
        nodes = read_nodes(os.environ)
    else:
        count, index = machines
        nodes = Nodes(count, index, master_addr=None, master_port=None)
    check_interface(os.environ)
    check_share_gpu(options, nodes.count)
    _check_paths(options)
    check_notice(options)
    _tracker_names(options)  # this call raises ConfigError for an unknown tracker
    return Job(
        name=app.name,
        program=app.folder / "train.py",
        template=template,
        nproc=nproc,
        nodes=nodes,
        options=options,
        arguments=arguments,
        hooks=app.hooks,
    )


def _print_command(app: App, job: Job) -> None:
    python = os.environ.get("PYTHON") or str(app.environment.link / "bin" / "python")
    run_dir = job.options.run_dir or Path("runs", app.name, "UTC-TIME")
    port = job.nodes.master_port or 29500
    print(shlex.join(job.command(python, port, run_dir / "log")))


# --- the end of the first stage ---------------------------------------------------------------------------------------


def _exec_second_stage(app: App, options: Options) -> NoReturn:
    """Create the app's environment if it is missing, and replace this process by the second stage there."""
    python = environments.given_python(app.root)
    if python is None:
        python = app.environment.ensure(app.hooks.setup_environment(options))
    sys.stdout.flush()
    program, *words = sys.argv
    try:
        os.execv(python, [python, program, SECOND_STAGE, *words])
    except OSError as error:
        raise ConfigError(f"cannot run {python}: {error.strerror}: name an interpreter by PYTHON=") from None


# --- the second stage ------------------------------------------------------------------------------------------------


def _run(app: App, job: Job) -> int:
    """Run the job in the app's environment, and return its exit code."""
    warn_of_other_ranks(os.environ, job.nodes)
    app.environment.check_requirements()
    check_imports()
    app.hooks.check_installed(job.options, job.nproc)
    node = None
    if job.nodes.need_preflight:
        code = [*app.folder.glob("*.py"), *app.root.glob(f"scripts/run_{app.name}.sh")]
        node = node_info(job, app.root, code=code, versions=app.environment.versions())
    return run_job(job, node, _tracker_process(app.root, job))


def _tracker_names(options: Options) -> list[str]:
    if options.track is None:
        return []
    return trackers.parse_names(options.track)


def _tracker_process(root: Path, job: Job) -> trackers.TrackerProcess | None:
    """Return the tracker process of --track; None without --track, or if this machine writes no metrics.jsonl."""
    names = _tracker_names(job.options)
    if not names or job.nodes.rank > 0 or job.options.evaluate_only:
        return None
    return trackers.TrackerProcess(root, names, python=trackers.find_python(root, names))


# --- the call --------------------------------------------------------------------------------------------------------


def _print_help(app: App, arguments: Sequence[str]) -> None:
    parser = app.module.build_parser(usage=app.usage)
    trains = parser.get_default("resume") is not None
    for name, command in parser.commands().items():
        if name in arguments:
            parser = command
            break
    parser.add_argument(DRY_RUN, action="store_true", help="print the launcher's command and exit")
    print(parser.format_help())
    print(_help(app, trains), end="")


def _help(app: App, trains: bool) -> str:
    if not trains:
        commands = list(app.hooks.commands) or [""]
        examples = _examples(app, [f"2 {command}" for command in commands[:3]])
        return HELP.format(app=app.name, examples=examples, prepares="", recovers="", stops="")
    resume = "2 --run-dir runs/a"
    calls = ["2 --max-steps 20", f"{resume}    # the same command resumes", f"{resume} --evaluate-only"]
    return HELP.format(
        app=app.name,
        examples=_examples(app, calls),
        prepares=" and prepares the data",
        recovers="\nA job that fails restarts from its newest checkpoint.",
        stops=STOP_HELP,
    )


def _examples(app: App, calls: Sequence[str]) -> str:
    return "\n".join(f"  bash scripts/run_{app.name}.sh {call}".rstrip() for call in calls)


def _ranks_per_node(app: App, arguments: list[str]) -> tuple[int, list[str]]:
    """Return N, from the first argument or else from the environment, and the remaining arguments.

    Raises:
        ConfigError: N is missing, malformed or out of range.
    """
    usage = app.usage
    has_n = bool(arguments) and not arguments[0].startswith("--") and arguments[0] not in app.hooks.commands
    if has_n:
        first, *rest = arguments
        return parse_integer("N", first, least=1, most=MAX_RANKS), rest
    name, text = env.first_set(os.environ, env.RANKS_PER_MACHINE)
    if not text:
        example = usage.replace(" N", " 4").replace(" COMMAND", " all").replace(" [options]", "")
        raise ConfigError(f"N, the number of ranks, is missing: {usage}, for example: {example}")
    return parse_integer(name, text, least=1, most=MAX_RANKS), arguments


def _app_options(root: Path, app: str) -> Any:
    """Import the app's options.py, and return the module.

    The file may import the standard library, samestep and modules in the file's folder.

    Raises:
        ConfigError: the app is unknown, or its options.py has no HOOKS.
    """
    path = root / "apps" / app / "options.py"
    spec = importlib.util.spec_from_file_location("app_options", path)
    if spec is None or spec.loader is None or not path.exists():
        known = sorted(folder.parent.name for folder in root.glob("apps/*/options.py"))
        near = difflib.get_close_matches(app, known, n=1)
        if near:
            raise ConfigError(f"unknown app {app}: did you mean {near[0]}?")
        raise ConfigError(f"unknown app {app}: apps: {', '.join(known)}")
    # The app's folder comes last, because a file of the app may have the name of a library's module.
    sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses search sys.modules for the module of a class
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, "HOOKS", None), AppHooks):
        raise ConfigError(f"{path} has no HOOKS: end it with HOOKS: AppHooks[Options] = AppHooks()")
    return module


def check_share_gpu(options: Options, machines: int) -> None:
    """Check that --share-gpu can work here.

    Raises:
        ConfigError: the job has several machines, or PYTHON is not set and this machine lacks an NVIDIA driver.
    """
    if not options.share_gpu:
        return
    if machines > 1:  # with --share-gpu, ranks communicate over the loopback interface
        raise ConfigError(f"--share-gpu is for one machine, and this job has {machines}: leave it out")
    if not environments.has_nvidia() and not os.environ.get("PYTHON"):  # PYTHON's packages may support other GPUs
        raise ConfigError("--share-gpu: this machine has no NVIDIA driver: use --device cpu")


def check_notice(options: Options) -> None:
    """Check the value of --preemption-notice and the address of the metadata service.

    Raises:
        ConfigError: the address is invalid, or the file of ``file:PATH`` is unreadable or not in an existing folder.
    """
    source = options.preemption_notice
    if source is None:
        return
    from samestep_launch import preemption  # only --preemption-notice needs this module

    preemption.metadata_url(os.environ)
    path = preemption.notice_file(source)
    if path is None:
        return
    what = "--preemption-notice"
    status = look_up(what, path)
    folder = look_up(what, path.absolute().parent)
    if folder is None or not stat.S_ISDIR(folder.st_mode):
        raise ConfigError(f"{what} {source}: its folder is missing: make the folder, or name another file")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{what} {source} is not a file: name a file")
    if status is not None and not os.access(path, os.R_OK):
        raise ConfigError(f"{what} {source} cannot be read: name another file")


def _check_old_modules(folder: Path) -> None:
    """Raise ConfigError if a file of the app imports a module that version 0.3 moved or removed."""
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(read_text(path))
        except (OSError, SyntaxError, ValueError):  # Python reports the error if the app imports the file
            continue
        for number, imported in _imports(tree):
            for name in OLD_MODULES:
                if f"{imported}.".startswith(f"samestep.{name}."):
                    raise ConfigError(
                        f"{path}:{number}: samestep 0.3 has no samestep.{name}: "
                        "its new name is in the table under 0.3.0 in CHANGELOG.md"
                    )


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line number and the full name of each absolute import, such as (3, "os.path")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield node.lineno, each.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for each in node.names:
                yield node.lineno, f"{node.module}.{each.name}"


def _check_paths(options: Options) -> None:
    """Check the values of --run-dir, --data-dir and --init-from.

    Raises:
        ConfigError: --run-dir or --data-dir exists but is not a directory, or --init-from is not a safetensors file.
    """
    check_run_dir(options.run_dir)
    if options.offers("data_dir"):
        _check_directory("--data-dir", options.data_dir)
    if options.init_from is not None:
        _check_weights(options.init_from)


def _check_weights(path: Path) -> None:
    status = look_up("--init-from", path)
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"--init-from {path}: the file is missing: name a run's model.safetensors")
    # A safetensors file starts with its header's length (8 bytes, little-endian) and the header in JSON.
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise ConfigError(f"--init-from {path}: {error.strerror}: name a run's model.safetensors") from None
    if int.from_bytes(start[:8], "little") > status.st_size or start[8:] != b"{":
        raise ConfigError(f"--init-from {path} is not a safetensors file: name a run's model.safetensors")


def check_run_dir(path: Path | None) -> None:
    """Check the value of --run-dir; None means a new run dir in the working directory.

    Raises:
        ConfigError: ``path`` exists but is not a directory, or the working directory is gone.
    """
    try:
        os.getcwd()
    except OSError:
        raise ConfigError("the working directory is gone: change to another one") from None
    _check_directory("--run-dir", path or Path())


def _check_directory(what: str, path: Path) -> None:
    status = look_up(what, path)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{what} {path} is not a directory: name a directory")


def look_up(what: str, path: Path) -> os.stat_result | None:
    """Return the status of a path; None if the path does not exist.

    Args:
        what: the option or argument that names the path, for errors.
        path: the file or folder to look up.

    Raises:
        ConfigError: the path cannot be accessed, or `check_name` rejects it.
    """
    check_name(what, os.path.realpath(path))
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}: name another place") from None


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an argument that is not UTF-8, because logs and JSON cannot contain it."""
    for argument in arguments:
        if re.search(f"[{SURROGATES}]", argument):
            raise ConfigError(f"the argument {argument!r} is not UTF-8: choose another name")


def check_name(what: str, name: object) -> None:
    """Raise ConfigError if a name contains a control character or line separator, or is not UTF-8."""
    if UNUSABLE.search(str(name)):
        raise ConfigError(f"{what} {str(name)!r} has a control character, or is not UTF-8: choose another name")
