"""Run a job on this machine: resolve run dir and data, check the other machines, start and restart the launcher.

Launch scripts (`samestep_launch.app`) and ``samestep run`` (`samestep_launch.run_command`) use this module in the
Python environment of the ranks. Importing this module needs no third-party package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from samestep import ConfigError, NonRetryableError, env, events, failures, untrusted
from samestep.hooks import AppHooks
from samestep.job_info import JobInfo, this_launcher
from samestep.options import FORK, Options
from samestep.root import Root

from samestep_launch import supervise, user_folder
from samestep_launch.environments import has_nvidia
from samestep_launch.fork_server import MODULE as OUR_TORCHRUN
from samestep_launch.fork_server import ForkServer
from samestep_launch.supervise import print_stderr
from samestep_launch.trackers import TrackerProcess

if TYPE_CHECKING:
    from samestep_launch.preflight import NodeInfo, Rendezvous

# Options that may differ between machines.
MAY_DIFFER = ("data_dir", "init_from", "preemption_notice", "quiet", "requested_dataset", "run_dir")
TORCHRUN = "torch.distributed.run"  # torchrun's module
RANK_FORKER = "samestep_launch.rank_forker"
# Limit in seconds for the report to the other machines that this machine will not restart.
REPORT_SECONDS = 10.0
LONG_REPORT_SECONDS = 60.0  # the limit if the other machines may not have noticed the failure
# Pattern of the log files that the launch script and the ranks write, read or remove, and of their temporary files.
LOG_FILE = re.compile(r"\.?(alive|events|failure|hang|hanging|launcher|no-restart|rank|stack|stalled)\b.*")


@dataclass(frozen=True)
class Nodes:
    """The machines of a job.

    Attributes:
        count: number of machines.
        rank: this machine's number, from 0.
        master_addr: machine 0's address; None on one machine, or if a file of the app's launcher lists the machines.
        master_port: port at machine 0; None if the user has set no port.
        secret: secret that all machines share; b"" for none.
    """

    count: int
    rank: int
    master_addr: str | None
    master_port: int | None
    secret: bytes = field(default=b"", repr=False)

    @property
    def need_preflight(self) -> bool:
        """Whether the machines' launch scripts connect to each other before they start the launchers."""
        return self.count > 1 and self.master_addr is not None

    @property
    def place(self) -> tuple[str, int]:
        """Address and port at which the machines connect."""
        return str(self.master_addr), int(self.master_port or 0)


def read_nodes(environ: Mapping[str, str]) -> Nodes:
    """Return the job's machines from NNODES and NODE_RANK, from PET_*, or from RANK and WORLD_SIZE.

    RANK and WORLD_SIZE must count machines. If no other variable gives this machine's number, the number is
    JOB_COMPLETION_INDEX, which a Kubernetes Indexed Job sets.

    Raises:
        ConfigError: a variable is missing, malformed or out of range, or the port or the secret's file cannot be used.
    """
    environ = env.without_other_ranks(environ)
    name, text = env.first_set(environ, env.MACHINE_COUNT)
    if not text:
        _check_one_machine(environ)
    count = parse_integer(name, text, least=1, default=1)
    if count == 1:
        return Nodes(count, 0, None, _master_port(environ, listens=True))
    counted = f"{name}={text} counts machines"
    otherwise = f", or unset {name} to train on one machine"
    rank_name, rank_text = env.first_set(environ, env.MACHINE_INDEX)
    if not rank_text:
        raise ConfigError(f"{counted}, but NODE_RANK is not set: set it to this machine's number, from 0{otherwise}")
    rank = parse_integer(rank_name, rank_text, least=0)
    if rank >= count:
        raise ConfigError(f"{rank_name}={rank_text} is not below {name}={text}: number the machines from 0")
    _, address = env.first_set(environ, env.MACHINE_ADDRESS)
    if not address:
        raise ConfigError(f"{counted}, but MASTER_ADDR is not set: set it to an address of machine 0{otherwise}")
    port = _master_port(environ, listens=rank == 0)
    if port is None:
        remedy = "choose a free port of machine 0, the same on all"
        raise ConfigError(f"{counted}, but MASTER_PORT is not set: {remedy}{otherwise}")
    from samestep_launch.preflight import read_secret  # only jobs on several machines need this module

    return Nodes(count, rank, address, port, read_secret(environ))


def _check_one_machine(environ: Mapping[str, str]) -> None:
    """Check that no variable numbers this machine, because no variable gives the number of machines.

    Raises:
        ConfigError: RANK is set, or another variable gives this machine a number other than 0.
    """
    if environ.get("RANK"):
        raise ConfigError(f"RANK={environ['RANK']} is set but WORLD_SIZE is not: set both (machines), or neither")
    name, text = env.first_set(environ, env.MACHINE_INDEX)
    if text not in ("", "0"):
        raise ConfigError(f"{name}={text} is set but NNODES is not: set it to the number of machines, or unset {name}")


def _master_port(environ: Mapping[str, str], listens: bool) -> int | None:
    """Return MASTER_PORT, or None if it is not set.

    Raises:
        ConfigError: the value is not a port, or this machine ``listens`` at the port but the port is in use.
    """
    name, text = env.first_set(environ, env.MACHINE_PORT)
    if not text:
        return None
    port = parse_integer(name, text, least=1, most=65535)
    if listens and not user_folder.port_is_free(port):
        raise ConfigError(f"{name}={port} is in use on this machine: choose another, or unset it to have one chosen")
    return port


def warn_of_other_ranks(environ: Mapping[str, str], nodes: Nodes) -> None:
    """Print a warning if another launcher seems to have started several processes of this script.

    Each process would run a separate job. A warning is enough, because an ended job may have left the variables.
    """
    try:
        world = env.detect(environ)
    except env.EnvError:
        return
    if nodes.count == 1 and world.world_size > 1:
        place = f"{world.launcher}'s variables make this process number {world.rank} of {world.world_size}"
        remedy = "for several machines, set NNODES and NODE_RANK"
        print_stderr(f"warning: {place}: ignoring them, because this script starts the ranks; {remedy}")


def parse_integer(name: str, text: str, least: int, most: int | None = None, default: int | None = None) -> int:
    """Return the integer ``text``, or ``default`` if ``text`` is empty.

    Args:
        name: the variable or option, for the error.
        text: the value, as digits.
        least: the smallest number allowed.
        most: the largest number allowed; None for no limit.
        default: the number of an empty text; None means that an empty text is an error.

    Raises:
        ConfigError: the text is not an integer from ``least`` to ``most``.
    """
    if not text and default is not None:
        return default
    limit = f"of at least {least}" if most is None else f"from {least} to {most}"
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ConfigError(f"{name}={text} is not a whole number {limit}")
    number = int(text)
    if number < least or (most is not None and number > most):
        raise ConfigError(f"{name}={text} is not a whole number {limit}")
    return number


@dataclass(frozen=True)
class Job:
    """A job, as this machine runs it.

    Attributes:
        name: name of the app or of the program.
        program: path of the program that the ranks run.
        template: the launcher's command, with placeholders such as {nproc}; see `command`.
        nproc: number of ranks on this machine.
        nodes: the machines of the job.
        options: the parsed options.
        arguments: the options of the program, as the user gave them.
        hooks: the app's functions and settings for the launch script.
        has_heartbeats: whether the program is known to use the watchdog, which writes heartbeats.
    """

    name: str
    program: Path
    template: Sequence[str]
    nproc: int
    nodes: Nodes
    options: Options
    arguments: Sequence[str]
    hooks: AppHooks[Any] = field(default_factory=AppHooks)
    has_heartbeats: bool = True

    @property
    def trains(self) -> bool:
        """Whether the job has a dataset and checkpoints, which are resolved before the job's start."""
        return self.options.offers("resume")

    @property
    def forks(self) -> bool:
        """Whether the launcher forks the ranks from a process that has imported the program.

        Without --start-method, the value is False on a machine with an NVIDIA driver, because forked ranks are not
        tested on GPUs.
        """
        method = self.options.start_method
        return method == FORK or (method is None and not has_nvidia())

    def command(self, python: str, port: int, logs: Path, *more: str, met: Rendezvous | None = None) -> list[str]:
        """Return the launcher's command, which is the template with values for its placeholders.

        A word is left out if one of its placeholders has no value. {options} becomes the arguments and ``more``, and
        {arguments} becomes the arguments alone. If the ranks are forked, {forker} becomes the command of
        `samestep_launch.rank_forker`; otherwise {forker} is left out. `samestep_launch.torchrun` replaces torchrun if
        the ranks are forked or the job has one machine. In a job on one machine, the store of
        `samestep_launch.torchrun` listens only on 127.0.0.1.

        Args:
            python: path of the Python that runs the launcher.
            port: port of the master, or of the launcher's store.
            logs: folder for the launcher's log files.
            more: options of the program that follow the user's options.
            met: values that the machines share; None without a preflight.
        """
        values = {
            **vars(self.options),
            **self._place(met),
            "python": python,
            "nproc": self.nproc,
            "nnodes": self.nodes.count,
            "node_rank": self.nodes.rank,
            "master_port": port,
            "log_dir": logs,
            "app": self.program.parent,
            "train": self.program,
        }
        lists = {
            "{options}": [*self.arguments, *more],
            "{arguments}": self.arguments,
            "{forker}": ["-m", RANK_FORKER, str(self.program)] if self.forks else [],
        }
        command: list[str] = []
        for word in self.template:
            if word in lists:
                command += lists[word]
            elif word == TORCHRUN:
                command += self._torchrun()
            elif _has_values(word, values):
                command.append(word.format(**values))
        return command

    def _place(self, met: Rendezvous | None) -> dict[str, Any]:
        """Return the addresses and the world size as values for `command`."""
        if met:
            return {"host": met.address, "master_addr": met.master, "world_size": sum(met.ranks)}
        return {
            "host": "127.0.0.1" if self.nodes.count == 1 else None,
            "master_addr": self.nodes.master_addr or "127.0.0.1",
            "world_size": self.nproc * self.nodes.count,
        }

    def _torchrun(self) -> list[str]:
        """Return torchrun's module, or `samestep_launch.torchrun` and its options, as words of the command."""
        if self.forks:
            return [OUR_TORCHRUN, "--start-method=fork"]
        if self.nodes.count == 1:
            return [OUR_TORCHRUN]
        return [TORCHRUN]


def _has_values(word: str, values: Mapping[str, Any]) -> bool:
    """Return whether all placeholders of a template's word have a value."""
    names = [name for _, name, _, _ in Formatter().parse(word) if name]
    return all(values[name] is not None for name in names)


def node_info(job: Job, root: Path, code: Sequence[Path], versions: Mapping[str, str]) -> NodeInfo:
    """Return this machine's description for the other machines.

    Args:
        job: the job of this machine.
        root: the folder to which the description's paths of ``code`` are relative.
        code: the files of the program.
        versions: versions of packages, by name.
    """
    import samestep
    from samestep.options import as_json

    from samestep_launch.preflight import NodeInfo, digests

    differ = {*MAY_DIFFER, *job.hooks.may_differ}
    # The code of ranks and launchers must be the same on all machines.
    package = [*Path(samestep.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    return NodeInfo(
        app=job.name,
        machine=job.nodes.rank,
        machines=job.nodes.count,
        ranks=job.nproc,
        options={name: value for name, value in as_json(job.options).items() if name not in differ},
        files=digests(root, [*code, *package]),
        versions=versions,
    )


def run_job(job: Job, node: NodeInfo | None, trackers: TrackerProcess | None = None) -> int:
    """Run the job, restart it after failures, and return the exit code.

    At the job's end, this machine sends a message to the other machines, which would otherwise wait for this machine.

    Args:
        job: the job to start.
        node: this machine's `node_info`; None if the job needs no preflight.
        trackers: the process of --track; None if this machine starts no tracker.
    """
    state = JobState()
    is_new = job.options.run_dir is None
    code = 1
    try:
        with _watch_for_preemption(job):
            code = _run_and_report(job, node, state, trackers)
        return code
    except supervise.Stopped as stopped:
        code = 128 + stopped.number
        raise
    finally:
        if is_new and not state.name and job.options.run_dir:  # the launcher has never started
            shutil.rmtree(job.options.run_dir, ignore_errors=True)
        if trackers:
            trackers.finish(stopped=code > 128)


def _watch_for_preemption(job: Job) -> AbstractContextManager[None]:
    """Return a context in which a notice of --preemption-notice stops the job as TERM does."""
    source = job.options.preemption_notice
    if source is None:
        return contextlib.nullcontext()
    from samestep_launch import preemption  # only --preemption-notice needs this module

    def record(text: str) -> None:
        if job.options.run_dir:
            events.append_event(job.options.run_dir / "log", events.SIGNAL, source="launcher", text=text)

    return preemption.watch(source, record)


def _run_and_report(job: Job, node: NodeInfo | None, state: JobState, trackers: TrackerProcess | None) -> int:
    """Run the job, report its end to the other machines, and return its exit code."""
    reason = ""  # message to the other machines
    try:
        with contextlib.closing(ForkServer()) as server:
            if job.forks:
                state.start = server.start
            code = _run_with_restarts(job, node, state, trackers)
        reason = _reason(code)
        return code
    except supervise.Stopped as stopped:
        if state.verdict is None:  # with a verdict, the ranks have recorded the signal and the step
            _record_stop(job, state, stopped.number)
            reason = f"was stopped by signal {stopped.number}"
        raise
    except (ConfigError, NonRetryableError):  # the preflight has reported its errors to all machines
        raise
    except BaseException:
        reason = "has failed: see its messages there"
        raise
    finally:
        if node and reason:
            _report_end(job, node, state, reason)


def _reason(code: int) -> str:
    """Return how a job has ended, such as "has finished"; "" after a stop, because all machines stop together."""
    if code == 0:
        return "has finished"
    if code < 128:
        return f"has ended with code {code}: see its messages there"
    return ""


def _record_stop(job: Job, state: JobState, number: int) -> None:
    if not state.name:  # the launcher has never started
        return
    text = f"the launch script was stopped by signal {number}"
    events.append_event(job.options.run_dir / "log", events.SIGNAL, source="launcher", text=text)


def _report_end(job: Job, node: NodeInfo, state: JobState, reason: str) -> None:
    """Report to the other machines that this machine will not restart, if the job has started."""
    from samestep_launch import preflight

    if not state.name:
        return
    limit = REPORT_SECONDS  # without a verdict, all machines have noticed the failure
    if state.verdict is not None:
        limit = LONG_REPORT_SECONDS
    with contextlib.suppress(supervise.Stopped):
        preflight.abort(
            replace(node, after=state.name), *job.nodes.place, reason=reason, limit=limit, secret=job.nodes.secret
        )


# --- resolved once, before the first start -----------------------------------------------------------------------


def _resolve(job: Job) -> dict[str, Any]:
    """Resolve the run dir, and on machine 0 the dataset and the checkpoint.

    Returns:
        The values that the other machines need; {} on a machine other than machine 0.
    """
    from samestep import rundir

    if job.nodes.rank > 0:  # machine 0 resolves the dataset and the checkpoint, and rank 0 broadcasts the result
        job.options.run_dir = (job.options.run_dir or rundir.new(job.name)).resolve()
        rundir.make_log_folder(job.options.run_dir)
        return {}
    run_dir: Path = job.options.run_dir or rundir.new(job.name)
    job.options.run_dir = run_dir.resolve()
    plan: dict[str, Any] = {"run_dir": str(run_dir)}
    if job.trains:
        from samestep.data import datasets

        job.options.resolve_dataset = job.options.resolve_dataset or datasets.resolve
        resolved = rundir.resolve(job.name, job.options, verify=False)
        lock = resolved.lock
        dataset = resolved.dataset
        first_step = resolved.checkpoint.step if resolved.checkpoint else 0
        job.hooks.check_start(job.options, dataset.name, first_step)
        plan["dataset"] = dataset.name
        plan["fingerprint"] = dataset.fingerprint
        plan["requested"] = resolved.requested_dataset
    else:
        _, lock = rundir.lock_run_dir(job.name, job.options.run_dir)
    _check_log(job)
    lock.release(rundir.WRITER_BYTE)  # rank 0 locks this byte; this process keeps the launcher's byte locked
    return plan


def _check_log(job: Job) -> None:
    """Raise ConfigError if a log file of the run dir is not a regular file, or has several hard links."""
    logs = job.options.run_dir / "log"
    supervise.open_log(logs / "launcher.log").close()
    for path in sorted(logs.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # a rank of an earlier start may remove its temporary file
            status = path.lstat()
            if not LOG_FILE.fullmatch(path.name):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{_shown_in(logs, path)} is not a regular file: remove it")
            if status.st_nlink > 1:
                raise ConfigError(f"{_shown_in(logs, path)} is a hard link, another name of the same file: remove it")


def _shown_in(folder: Path, path: Path) -> str:
    return f"{folder}/{untrusted.shown(path.name)}"


def _preflight(job: Job, node: NodeInfo, resolve: Callable[[], Mapping[str, Any]]) -> Rendezvous:
    """Connect to the job's other machines, check the plan of machine 0, and return the shared values."""
    from samestep import rundir
    from samestep.data import datasets

    from samestep_launch import preflight

    def prepare(plan: Mapping[str, Any]) -> None:
        if not {"run_dir", "job"} <= plan.keys():
            raise ConfigError("machine 0 sent no run dir: check out the same commit on all machines")
        job.options.run_dir = Path(job.options.run_dir or plan["run_dir"]).resolve()
        rundir.make_log_folder(job.options.run_dir)
        _check_log(job)
        if "dataset" in plan:
            resolve_dataset = job.options.resolve_dataset or datasets.resolve
            here = resolve_dataset(plan["dataset"], job.options.data_dir, fallback=False)
            there = plan.get("fingerprint")
            if here.fingerprint != there:
                raise ConfigError(
                    f"its {here.name} in {here.folder.resolve()} is not machine 0's (SHA-256 "
                    f"{str(here.fingerprint)[:12]}, there {str(there)[:12]}): put the same files there"
                )

    def plan() -> dict[str, Any]:
        values = {**resolve(), "job": uuid.uuid4().hex}
        if not job.hooks.late_machines:
            return values
        with user_folder.reserved_port(None) as port:  # this process keeps MASTER_PORT for late machines
            return {**values, "port": str(port)}

    equal_ranks = job.hooks.equal_ranks
    secret = job.nodes.secret
    return preflight.preflight(node, *job.nodes.place, job.options.timeout, plan, prepare, equal_ranks, secret)


def _late_machines(job: Job, node: NodeInfo | None, met: Rendezvous | None) -> AbstractContextManager[None]:
    """Return a context that admits late machines, if the app can continue without a lost machine."""
    if not (node and met and job.nodes.rank == 0 and "port" in met.plan):
        return contextlib.nullcontext()
    from samestep_launch import preflight

    return preflight.admit_late(node, *job.nodes.place, met, job.nodes.secret)


# --- starts and restarts -----------------------------------------------------------------------------------------


@dataclass
class JobState:
    """The progress of a job.

    Attributes:
        name: name of the last start; "" before the first start.
        verdict: exit code that a rank recorded at the last start because a restart cannot help; None if no rank did.
        start: function that starts the launcher.
    """

    name: str = ""
    verdict: int | None = None
    start: supervise.Starter = supervise.start_program


@dataclass(frozen=True)
class Outcome:
    """The outcome of one start of the launcher.

    Attributes:
        code: the launcher's exit code, or minus the number of the launcher's fatal signal.
        complete: False if a file of this start shows that rank 0 did not end cleanly, so that exit code 0 is wrong.
        verdict: see `JobState`.
        stepped: whether a rank completed an update; None if unknown.
        crashes: text for the error message about ranks that a signal ended; "" if no signal ended a rank.
        failure: the exception of the first rank that failed; None if no rank recorded an exception.
    """

    code: int
    complete: bool = True
    verdict: int | None = None
    stepped: bool | None = False
    crashes: str = ""
    failure: failures.Failure | None = None

    def repeats(self, history: Sequence[Outcome]) -> bool:
        """Return whether this start and the previous start failed with the same exception at the same step.

        The result is False if a signal ended a rank.
        """
        if not self.failure or self.crashes or not history:
            return False
        return self.failure.is_same(history[-1].failure)


@dataclass(frozen=True)
class Decision:
    """The decision whether the job ends or restarts.

    Attributes:
        exit_code: exit code of the job; None for a restart.
        message: the line to print; "" for none.
    """

    exit_code: int | None
    message: str = ""


def decide(outcome: Outcome, history: Sequence[Outcome], max_restarts: int, logs: Path) -> Decision:
    """Decide whether the job ends or restarts.

    Args:
        outcome: outcome of the last start.
        history: outcomes of the earlier starts, the oldest first.
        max_restarts: maximum number of restarts.
        logs: the run dir's ``log`` folder, for the message.
    """
    if outcome.code == 0 and outcome.complete:
        return Decision(0)
    if outcome.verdict is not None:
        return Decision(outcome.verdict)
    if -outcome.code in supervise.STOPS:  # a stop signal ended the launcher, which is not a failure
        return Decision(128 - outcome.code)
    see = f"see {logs}/launcher.log and rank-*.log"
    failure = outcome.failure
    if failure and outcome.repeats(history):
        return Decision(
            1, f"error: the job failed twice with the same error at step {failure.step}: {failure.text}: {see}"
        )
    if _never_stepped_twice([*history, outcome]):
        return Decision(1, f"error: the job failed twice before its first step: {see}")
    ended = f"the job ended with code {outcome.code}{outcome.crashes}"
    restart = len(history) + 1
    if restart <= max_restarts:
        return Decision(None, f"warning: {ended}; starting it again ({restart} of {max_restarts}), logs in {logs}")
    if max_restarts:
        ended += f" after {max_restarts} restarts"
    return Decision(1, f"error: {ended}: {see}")


def _never_stepped_twice(outcomes: Sequence[Outcome]) -> bool:
    """Return whether the job has started exactly twice, and no rank completed an update in either start."""
    return len(outcomes) == 2 and all(outcome.stepped is False for outcome in outcomes)


def _run_with_restarts(job: Job, node: NodeInfo | None, state: JobState, trackers: TrackerProcess | None) -> int:
    """Start the launcher, restart it after failures, and return the job's exit code."""
    resolve = functools.cache(lambda: _resolve(job))  # a restart uses the plan of the first start
    if job.nodes.count == 1:
        user_folder.check_loopback()
    history: list[Outcome] = []
    while True:
        rendezvous = _preflight(job, replace(node, after=state.name), resolve) if node else None
        plan = rendezvous.plan if rendezvous else resolve()
        logs = job.options.run_dir / "log"
        if trackers:
            trackers.start(job.options.run_dir)
        with _late_machines(job, node, rendezvous):
            outcome = attempt(job, state, len(history), plan, rendezvous)
        if outcome.code != 0 and not logs.is_dir():
            remedy = "leave the run dir in place while the job runs"
            raise NonRetryableError(f"the job cannot start again: its run dir {logs.parent} was removed: {remedy}")
        decision = decide(outcome, history, job.options.max_restarts, logs)
        if decision.message:
            print_stderr(decision.message, limit=supervise.CONSOLE_SECONDS)
            events.append_event(logs, events.FAILURE, source="launcher", code=outcome.code, text=decision.message)
        if decision.exit_code is not None:
            return decision.exit_code
        history.append(outcome)


def attempt(
    job: Job, state: JobState, number: int, plan: Mapping[str, Any], rendezvous: Rendezvous | None = None
) -> Outcome:
    """Start the launcher once, wait for its end, and return the outcome.

    Args:
        job: the job to start.
        state: progress of the job, in which the function sets the name of this start and the verdict.
        number: number of earlier starts.
        plan: the result of `_resolve`, or machine 0's plan after a preflight.
        rendezvous: values that the machines share; None without a preflight.

    Raises:
        Stopped: a signal arrived, and the job was stopped.
    """
    state.name = plan.get("job") or uuid.uuid4().hex
    logs = job.options.run_dir / "log"
    if job.nodes.rank == 0:  # only one machine removes the files, because machines may share the run dir
        _remove_traces(job.options.run_dir)
    try:
        end = _run_launcher(job, state, number, plan=plan, rendezvous=rendezvous)
    finally:
        state.verdict = _verdict(logs, state.name)
    return _outcome_of(job, state, end)


def _remove_traces(run_dir: Path) -> None:
    """Remove the files by which an earlier start reported its end."""
    for name in ("no-restart", "stalled", "stack-0.txt", failures.FILE_NAME):
        with contextlib.suppress(OSError):
            Root(run_dir).unlink(f"log/{name}")


def _run_launcher(
    job: Job, state: JobState, number: int, plan: Mapping[str, Any], rendezvous: Rendezvous | None
) -> supervise.LauncherEnd:
    """Reserve a port, create a temporary folder, run the launcher once, and return how the launcher ended."""
    run_dir: Path = job.options.run_dir
    arguments = [f"--run-dir={run_dir}"]
    if job.nodes.rank == 0 and "dataset" in plan:  # rank 0 broadcasts the dataset to the other machines
        arguments += ["--resume", f"--dataset={plan['dataset']}", f"--requested-dataset={plan['requested']}"]
    address = rendezvous.address if rendezvous else None
    environ = supervise.environment(_job_info(job, state.name, number), job.nproc, address=address)
    given_port = int(plan["port"]) if "port" in plan else job.nodes.master_port
    with user_folder.reserved_port(given_port) as port, user_folder.job_tmpdir(_is_local()) as variables:
        command = job.command(sys.executable, port, run_dir / "log", *arguments, met=rendezvous)
        environ |= variables
        start = _prepare_start(job, state, command=command, environ=environ)
        return supervise.run_once(start)


def _job_info(job: Job, name: str, number: int) -> JobInfo:
    """Return the values that the launch script passes to the ranks of a start.

    A rank compares the requested number of ranks with its world size, to detect lost ranks. Several machines may have
    different numbers of ranks, so their ranks get the number of machines instead.

    Args:
        job: the job to start.
        name: name of this start.
        number: number of earlier starts.
    """
    has_one_machine = job.nodes.count == 1
    parses_itself = not job.has_heartbeats  # other ranks get the timeout and the grace period as options
    return JobInfo(
        job=name,
        launcher=this_launcher(),
        run_dir=str(job.options.run_dir),
        restarts=number,
        ranks=job.nproc if has_one_machine else None,
        machines=None if has_one_machine else job.nodes.count,
        tmpdir=os.environ.get("TMPDIR") or str(user_folder.BASE),
        timeout=job.options.timeout if parses_itself else None,
        grace=job.options.grace if parses_itself else None,
    )


def _is_local() -> bool:
    """Return whether all ranks that this machine starts also run on this machine.

    horovodrun and mpirun may start ranks on other hosts, which do not have this machine's temporary folder.
    """
    return not os.environ.get("HOROVOD_HOSTS")


def _prepare_start(job: Job, state: JobState, command: Sequence[str], environ: Mapping[str, str]) -> supervise.Start:
    """Return the settings for `supervise.run_once`."""
    logs = job.options.run_dir / "log"
    grace = job.options.grace
    startup_grace = grace
    if job.has_heartbeats:
        startup_grace = min(grace, supervise.STOP_SECONDS)
    stop_hint = ""
    if job.trains:
        stop_hint = f": the ranks save a step; again, to end at once; --run-dir={job.options.run_dir} resumes"
    watch = supervise.HeartbeatWatch(
        state.name,
        logs,
        timeout=job.options.timeout,
        first_step_timeout=job.options.first_step_timeout or 0.0,
        must_start=job.trains and job.has_heartbeats and _is_local(),
    )
    return supervise.Start(
        job=state.name,
        command=command,
        environ=environ,
        logs=logs,
        grace=grace,
        startup_grace=startup_grace,
        watch=watch,
        line_prefix=job.hooks.line_prefix,
        stop_hint=stop_hint,
        program=None if job.has_heartbeats else job.program,
        start=state.start,
    )


def _outcome_of(job: Job, state: JobState, end: supervise.LauncherEnd) -> Outcome:
    """Return the outcome of a start, from the launcher's end and the files that its ranks left in the log folder."""
    logs = job.options.run_dir / "log"
    # After Ctrl-C, msrun kills its ranks and exits with 0. A rank that ends cleanly removes its stack file.
    may_be_killed = job.trains and job.nodes.rank == 0
    is_complete = not (may_be_killed and (logs / "stack-0.txt").is_file())
    if end.code == 0 and is_complete:
        return Outcome(0)
    from samestep.recovery import hang_diagnosis  # only a failure needs this module

    return Outcome(
        code=end.code,
        complete=is_complete,
        verdict=state.verdict,
        stepped=_has_stepped(job, state, logs),
        crashes=hang_diagnosis.crashes(logs, state.name, job.program.parent) or end.ended_rank,
        failure=failures.read(logs, state.name),
    )


def _has_stepped(job: Job, state: JobState, logs: Path) -> bool | None:
    """Return whether a rank completed an update; None if unknown."""
    beats = list(supervise.heartbeats(state.name, logs))
    if not beats and not job.has_heartbeats:
        return None
    return any(beat["updates"] > 0 for beat in beats)


def _verdict(logs: Path, job: str) -> int | None:
    """Return the exit code that a rank of this start recorded because a restart cannot help; None if no rank did."""
    verdict = untrusted.read_object(logs / "no-restart")
    is_code = untrusted.integer(1, 255)(verdict.get("code"))
    if not is_code or verdict.get("job") not in (None, job):
        return None
    return int(verdict["code"])
