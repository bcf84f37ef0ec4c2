"""Run a checked script with and without faults, each time in a copy of its folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from samestep import ConfigError
from samestep.options import Options

from samestep_check import states
from samestep_check.calls import AnnouncedCalls, Calls, FilteredCalls, Handler, is_supported
from samestep_check.job import Job, started
from samestep_check.records import Key, Records, Step
from samestep_check.script import Script
from samestep_check.source import Source, can_mount
from samestep_check.verdicts import ADAPTER, CannotTell, Failed, NotSeen, OutOfTime, Verdict

PATIENCE = 75.0  # maximum number of seconds from a fault to its effect; torchrun waits 30 s for ranks after TERM
HANGS = 5  # limit for a restart's first step, as a multiple of the undisturbed run's duration
MIN_RUN = 3.0  # minimum duration of all steps of a run with a fault, in seconds, ensured by pauses
LONG_RUN = 30.0  # the same for TERM, because ranks may agree on a stop only every few seconds
CLOSE = 1e-4  # relative difference of norms that rounding may cause
MOST_OWN = 0.01  # largest relative difference of weights between two undisturbed runs
WARNING = re.compile(r"(?i)no space|errno|warn|error|fail")
LOSS = r"(?i)\bloss\b[ =:]+([-+.\deE]+|nan|inf)"
CHECKPOINT = r"(?i)\.(pt|pth|bin|safetensors|np[yz]|pkl|pdparams|pdopt|h5|distcp)\b|ckpt|checkpoint|snapshot"
NOT_COVERED = (
    "the kernel refuses a mount namespace, so absolute paths in the script's files mean the folder itself; to allow it:"
    " sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, docker run --cap-add SYS_ADMIN in a container"
)
# Folders that a script may write to, in addition to TMPDIR.
ALLOWED = "/dev", "/proc", "/tmp", "~/.cache", "~/.config/matplotlib", "~/.triton", "~/.nv"  # noqa: S108


class Undisturbed(NamedTuple):
    """A run without a fault."""

    records: Records
    steps: list[Step]
    losses: int  # number of losses in the output
    warnings: int  # number of output lines that are warnings or errors
    duration: float  # in seconds, from the start to the launcher's end


class Restart(NamedTuple):
    """A restart of a script, after a fault."""

    code: int | None  # exit code; None if the restart was still running
    error: str  # the output's line with the error
    steps: list[Step]
    records: Records | None  # None if the launcher restarted the ranks


@dataclass
class Faulted:
    """A run with a fault, and the restart after it."""

    done: int  # number of steps of the ranks' first start; only those before the fault if `in_place`
    fault_time: float  # seconds since 1970 (UTC)
    code: int | None  # exit code; None if the job was still running
    duration: float  # seconds from the fault until all processes have ended, or until a time limit
    records: Records
    attempts: list[list[Step]]
    work: Path
    snapshot: Path  # a copy of ``work`` before the restart
    restart: Restart | None = None
    in_place: bool = False  # the other ranks continued without a restart of the job

    @property
    def again(self) -> list[Step]:
        """Return the steps of the restart."""
        return self.restart.steps if self.restart else []


class Recording(NamedTuple):
    """The recorded file system calls of a run, the recorded states of its folder, and one of its saves."""

    calls: list[states.Recorded]
    states: list[states.State]
    save: states.Save
    work: Path  # folder of the run
    is_complete: bool  # False if Python's audit hook reported the calls
    line: str | None  # line of the script that writes or renames a file of the save


def cached(function: Callable[[ScriptRunner], Any]) -> Any:
    """Return a property that is computed once. Each later access returns the same value or raises the same verdict."""
    name = function.__name__

    def value(runner: ScriptRunner) -> Any:
        results = runner.results
        if name not in results:
            try:
                results[name] = function(runner)
            except Verdict as verdict:
                results[name] = verdict
        if isinstance(results[name], Verdict):
            raise results[name]
        return results[name]

    return property(value)


class Clock:
    """The time limits of a check and of each row, in seconds."""

    def __init__(self, row_limit: float, total_limit: float) -> None:
        self._row_limit = row_limit
        now = time.monotonic()
        self._row_end = now + row_limit
        self._end = now + total_limit

    def begin_row(self) -> None:
        """Start the time limit of a row. Raise CannotTell if the check has no time left."""
        now = time.monotonic()
        self._row_end = now + self._row_limit
        if now > self._end:
            raise CannotTell("the time is over: raise --total-limit")

    def left(self) -> float:
        """Return the seconds that are left for the row."""
        return min(self._row_end, self._end) - time.monotonic()


def _real_paths(places: Sequence[str | Path]) -> list[str]:
    """Return absolute paths without symbolic links. A path is left out if its ``~`` cannot be expanded."""
    expanded = [os.path.expanduser(place) for place in places]
    return [os.path.realpath(place) for place in expanded if not place.startswith("~")]


def _check_patterns(options: Options) -> None:
    for name in ("loss_pattern", "checkpoint"):
        try:
            re.compile(vars(options)[name])
        except re.error as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}: give a regular expression") from None


class ScriptRunner:
    """Run the script, each time in a copy of its folder, and cache the runs that several rows share.

    Attributes:
        results: results of cached runs, by the name of the run.
        left_behind: number of processes, in all jobs so far, that outlived their launcher by `LEFT_GRACE` seconds.
        ranks: number of ranks of the command, as in `Script`.
        other: number of ranks for the rows that start the script at another world size.
    """

    def __init__(self, options: Options, command: Sequence[str], temporary: Path) -> None:
        _check_patterns(options)
        if options.adapter and not options.adapter.is_file():
            raise ConfigError(f"--adapter {options.adapter}: the file is missing: name a Python file")
        folder = Path.cwd().resolve()
        caches = tempfile.gettempdir(), os.environ.get("XDG_CACHE_HOME", "/dev")
        places = [*(options.allow_write or []), *caches, *ALLOWED]
        self.options = options
        self.script = Script(command, options.resume_command)
        self.source = Source(folder, options.link or [], options.fresh or [], is_covered=can_mount(temporary))
        self.clock = Clock(options.row_limit, options.total_limit)
        self.results: dict[str, Any] = {}
        self.left_behind = 0
        self.ranks = self.script.ranks
        self.other: int = options.other_n or self.ranks + 1
        self._guarded = temporary
        self._temporary = Path(options.keep or temporary).resolve()
        self._count = 0
        self._is_uncovered = False  # in a process of the script, the copy is not mounted over the folder
        self._config = {
            "source": str(folder),
            "allowed": _real_paths(places),
            "checkpoint": options.checkpoint,
            "adapter": str(options.adapter.resolve()) if options.adapter else None,
            "check": temporary.name,  # by which `cleanup` finds the processes of this check's jobs
        }
        self.source.check(options.copy_limit, self._temporary)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def new_path(self, kind: str) -> Path:
        """Return a new path in the temporary folder."""
        self._count += 1
        return self._temporary / f"{kind}-{self._count}"

    def copy(self, source: Path | None = None) -> Path:
        """Copy a folder, by default the script's folder, and return the path of the copy."""
        work = self.new_path("work")
        if source is None:
            self.source.copy(work)
        else:
            shutil.copytree(source, work, symlinks=True)
        return work

    @contextmanager
    def job(
        self,
        work: Path,
        ranks: int | None = None,
        is_restart: bool = False,
        calls: Calls | None = None,
        **config: Any,
    ) -> Iterator[Job]:
        """Start the script in a copied folder.

        Args:
            work: copied folder in which the script runs.
            ranks: number of ranks, by default the command's.
            is_restart: whether to run the command that resumes the script.
            calls: object that pauses the job before its file system calls; None for no pauses.
            config: settings for the recorder in each process.

        Yields:
            The started job.

        Raises:
            ConfigError: the command is not on PATH.
        """
        records = self.new_path("records")
        words = self.script.words(ranks or self.ranks, is_restart)
        if shutil.which(words[0]) is None:
            raise ConfigError(f"cannot run {words[0]}: name a command on PATH")
        command = self.source.command(words, work)
        with started(command, work, records, {**self._config, "kept": self.source.kept, **config}, calls) as job:
            yield job
            self.left_behind += job.left_behind

    def patience(self) -> float:
        """Return the seconds that are left for a run, at least 1."""
        return max(1.0, self.clock.left())

    def undisturbed_at(self, ranks: int) -> Undisturbed:
        """Run the script at a number of ranks, without a fault, to its end, and return the run.

        Raises:
            Failed: the script fails at the command's number of ranks.
            CannotTell: the script fails at another number of ranks, or still runs at the time limit.
        """
        with self.job(self.copy(), ranks) as job:
            has_ended = job.wait_for_end(self.patience())
            self._is_uncovered |= any(notes.is_uncovered for notes in job.read().notes())
            if not has_ended:
                raise CannotTell(f"at {ranks} ranks it does not end in {job.duration:.0f} s")
            if job.code:
                # The script may fix the number of ranks elsewhere, so a failure at another number shows no fault.
                verdict = Failed if ranks == self.ranks else CannotTell
                raise verdict(f"at {ranks} ranks: exit {job.code}: {job.error_line()}")
            output = job.output()
            losses = len(re.findall(self.options.loss_pattern, output))
            records = job.read()
            return Undisturbed(records, records.steps(), losses, warnings_in(output), job.duration)

    @cached
    def reference(self) -> Undisturbed:
        return self.undisturbed_at(self.ranks)

    def run_reference(self) -> None:
        """Run the script without a fault, and cache the run for the rows. Raise Verdict if the run fails."""
        with suppress(Verdict):
            _ = self.reference
        if self.source.is_covered and self._is_uncovered:
            # A service, such as Slurm's, may have started the ranks outside of the launcher's mount namespace.
            self.source.uncover()
            self.results.clear()
        _ = self.reference

    @cached
    def twin(self) -> Undisturbed:
        try:
            return self.undisturbed_at(self.ranks)
        except Verdict as verdict:
            raise CannotTell(f"differs from itself: the repetition: {verdict}") from None

    @cached
    def single(self) -> Undisturbed:
        return self.undisturbed_at(1)

    @cached
    def at_other(self) -> Undisturbed:
        return self.undisturbed_at(self.other)

    # --- the undisturbed run -----------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Step]:
        """Return the steps of the undisturbed run."""
        found: list[Step] = self.reference.steps
        return found

    @property
    def total(self) -> int:
        """Return the number of steps of the undisturbed run, or of losses in its output if no step is recorded."""
        return len(self.steps) or int(self.reference.losses)

    def notes(self) -> list[str]:
        """Return notes to print above the table: limits of the check, and the parts of samestep.torch in use."""
        found = []
        parts: set[str] = set()
        unseen: set[str] = set()
        awaited: set[str] = set()
        imported: set[str] = set()
        all_notes = [*self.reference.records.notes()]
        for notes in all_notes:
            parts.update(notes.parts)
            unseen.update(notes.unseen)
            awaited.update(notes.awaited)
            imported.update(notes.imported)
        if parts:
            found.append(f"the script uses {', '.join(sorted(parts))} of samestep.torch")
        if any(notes.is_inferred for notes in all_notes):
            found.append("batches of steps are inferred from the loader")
        found += [f"the check could not see everything: {words}" for words in sorted(unseen)]
        found += [f"the adapter's function for {module} is never called" for module in sorted(awaited - imported)]
        if not self.source.is_covered:
            found.append(NOT_COVERED)
        if self.source.special:
            found.append(f"not copied, as they are no files: {', '.join(self.source.special)}")
        old = self.source.checkpoints(self.options.checkpoint)
        if old:
            found.append(f"if {old[0]} is a checkpoint of an earlier run, leave it out by --fresh {old[0]!r}")
        return found

    def samples(self) -> list[list[Key]]:
        """Return the keys of the examples of each undisturbed step.

        Raises:
            NotSeen: no step is recorded, or an example has no key.
            CannotTell: a repetition of the run has other examples.
        """
        if not self.steps:
            raise NotSeen(f"no optimizer step: {ADAPTER}")
        first = self._seen_samples()
        second = [step.indices for step in self.twin.steps]
        if first != second:
            raise CannotTell(f"differs from itself by the samples of step {_first_difference(first, second) + 1}")
        return first

    def require_common_keys(self, other: Records) -> None:
        """Raise NotSeen if each rank trains on a dataset of its own examples.

        Such a dataset numbers the examples from 0, so keys of another rank or world size mean other examples.

        Args:
            other: the records of a run at another number of ranks.
        """
        ranks = self.reference.records.sizes()
        if not ranks:
            return
        first = ranks[0]
        differ = any(sizes != first for sizes in ranks)
        if differ or any(not sizes <= first for sizes in other.sizes()):
            raise NotSeen(f"each rank numbers its own examples: {ADAPTER}")

    def _seen_samples(self) -> list[list[Key]]:
        found = [step.indices for step in self.steps if step.indices is not None]
        if len(found) < len(self.steps):
            reasons = {notes.reason for notes in self.reference.records.notes() if notes.reason}
            words = "; ".join(sorted(reasons)) or "examples without numbers"
            raise NotSeen(f"{words}: {ADAPTER}")
        return found

    def bound(self) -> float:
        """Return the largest relative difference of weights that counts as equal, from a second undisturbed run.

        Raises:
            CannotTell: the two undisturbed runs differ in their first weights, or later by more than `MOST_OWN`.
        """
        twins = [*zip(self.steps, self.twin.steps)]
        own = [relative(a.weights, b.weights) for a, b in twins if a.weights and b.weights]
        largest = max(own, default=0.0)
        if twins and relative(twins[0][0].weights_before, twins[0][1].weights_before) > CLOSE / 100:
            raise CannotTell("differs from itself by its first weights: set a seed")
        if largest > MOST_OWN:
            raise CannotTell(f"differs from itself by {largest:.0e} of the weights")
        return max(CLOSE, 10 * largest)

    def pause(self, least: float = MIN_RUN) -> float:
        """Return the seconds to wait after each step, so that all steps together take at least ``least`` seconds."""
        steps = self.steps
        if not steps:
            return 0.0
        duration = steps[-1].time - steps[0].time
        return max(0.0, least - duration) / len(steps)

    # --- faults ------------------------------------------------------------------------------------------------------

    def goal(self) -> int:
        """Return the step of a fault.

        The fault happens at the first step after the checkpoint nearest to the middle of the run. This checkpoint is
        not the first, if others are saved in the first three quarters of the run, so that an older checkpoint exists.
        If the run has no checkpoint, the fault happens at the middle step.
        """
        total = self.total
        saved = sorted({save.step for save in self.reference.records.saves() if 0 < save.step < total - 1})
        if not saved:
            return max(1, total // 2)
        later = [step for step in saved[1:] if step < 3 * total / 4]
        nearest: int = min(later or saved, key=lambda step: abs(step - total / 2))
        return nearest + 1

    def middle(self, job: Job) -> None:
        """Wait until a job has reached the step of its fault.

        Raises:
            NotSeen: the undisturbed run shows neither steps nor losses.
            CannotTell: the job has ended before this step, or the row's time limit is reached.
        """
        if not self.total:
            raise NotSeen("neither a step nor a loss: give an --adapter, or a --loss-pattern")
        goal = self.goal()
        pattern = self.options.loss_pattern
        job.wait(lambda: job.code is not None or job.progress(pattern) >= goal, self.patience())
        if job.code is not None or job.progress(pattern) < goal:
            raise CannotTell(f"it did not come to step {goal}: exit {job.code}: {job.error_line()}")

    def victim(self, job: Job) -> int:
        """Return the PID of the rank with the highest number; raise NotSeen if no process has a rank."""
        records = job.read()
        ranks = records.ranks() or {each.rank: [each] for each in records.processes if each.rank is not None}
        if not ranks:
            raise NotSeen("no process has a rank in its environment")
        return ranks[max(ranks)][-1].pid

    def faulted(self, strike: Callable[[Job], object] | None, least: float = MIN_RUN, **config: Any) -> Faulted:
        """Run the script with a fault, restart it as a user would unless it exits with 0, and return both runs.

        Args:
            strike: function that injects the fault in the middle of the run; None if ``config`` sets the fault.
            least: minimum duration of all steps together, in seconds.
            config: settings for the recorder in each process.
        """
        work = self.copy()
        with self.job(work, pause=self.pause(least), **config) as job:
            if strike:
                self.middle(job)
                fault_time = time.time()
                strike(job)
            else:
                job.wait(lambda: job.code is not None, self.patience())
                fault_time = time.time()
            ended = job.wait_for_end(min(PATIENCE, self.patience()))
            code = job.code if ended else None
            duration = time.time() - fault_time
            records = job.read()
        attempts = records.attempts()
        done = len(attempts[0]) if attempts else 0
        run = Faulted(done, fault_time, code, duration, records, attempts, work, self.copy(work))
        if code == 0 and len(attempts) > 1:  # the launcher restarted the ranks
            run.restart = Restart(0, "", attempts[-1], None)
        elif code != 0:
            run.restart = self.restarted(work, self.ranks)
        return run

    def again(self, run: Faulted, ranks: int, change: Callable[[Path], None] = lambda work: None) -> Faulted:
        """Restore the folder of a run to its content before the first restart, restart the script, and return the run.

        Args:
            run: run with a fault, whose folder is restored.
            ranks: number of ranks for the restart.
            change: function that changes the content of the folder before the restart.

        Raises:
            NotSeen: ``ranks`` is another number of ranks than the script's, and each rank numbers its own examples.
        """
        shutil.rmtree(run.work)
        shutil.copytree(run.snapshot, run.work, symlinks=True)
        change(run.work)
        restart = self.restarted(run.work, ranks)
        if ranks != self.ranks and restart.records is not None:
            self.require_common_keys(restart.records)
        return replace(run, restart=restart)

    def restarted(self, work: Path, ranks: int) -> Restart:
        """Restart the script in a folder, wait for its end, and return the restart."""
        with self.job(work, ranks, is_restart=True) as job:
            ended = job.wait_for_end(self.patience())
            records = job.read()
            return Restart(job.code if ended else None, job.error_line(), records.steps(), records)

    def first_step(self, work: Path) -> Restart:
        """Restart the script in a folder, stop it after the first step of all ranks, and return the restart.

        Raises:
            OutOfTime: the row has no time to wait for the first step.
        """
        wanted = len(self.reference.records.ranks())
        limit = max(PATIENCE, HANGS * self.reference.duration)
        patience = self.patience()
        with self.job(work, self.ranks, is_restart=True, pause=self.pause(PATIENCE)) as job:
            # The pause leaves time to stop the job before a second step. [:1] drops a second step.
            job.wait(lambda: job.code is not None or job.processes_with_steps() >= wanted, min(limit, patience))
            records = job.read()
            steps = records.steps()[:1]
            if job.code is None and not steps and patience < limit:
                raise OutOfTime
            return Restart(job.code, job.error_line(), steps, records)

    @cached
    def killed(self) -> Faulted:
        run = self.faulted(lambda job: os.kill(self.victim(job), signal.SIGKILL))
        later = run.records.continued(run.fault_time) if run.code == 0 else []
        if later:
            run.done = sum(step.time <= run.fault_time for step in run.attempts[0])
            run.in_place = True
            run.restart = Restart(0, "", later, None)
        return run

    @cached
    def stopped(self) -> Faulted:
        """Return the run with a killed rank if that run failed, else a run with all processes killed."""
        killed: Faulted = self.killed
        return killed if killed.code else self.faulted(Job.kill)

    @cached
    def terminated(self) -> Faulted:
        return self.stopped_by(lambda job: job.process.terminate())

    def stopped_by(self, strike: Callable[[Job], object]) -> Faulted:
        """Run the script with a fault that must stop it. Repeat a run that ended all steps, with slower steps."""
        run = self.faulted(strike)
        if self.steps and run.done >= len(self.steps):
            return self.faulted(strike, least=LONG_RUN)
        return run

    # --- file system calls -------------------------------------------------------------------------------------------

    @cached
    def can_filter(self) -> bool:
        return is_supported(self._guarded)

    def calls(self, work: Path, handler: Handler) -> Calls:
        """Return an object that pauses a job in ``work`` before each call that changes files below ``work``.

        Raises:
            NotSeen: the kernel refuses the filter, and the socket for announcements cannot be created.
        """
        if self.can_filter:
            covered = str(self.source.folder) if self.source.is_covered else None
            return FilteredCalls(work, handler, covered)
        try:
            return AnnouncedCalls(self.new_path("calls"), handler)
        except OSError as error:
            raise NotSeen(f"the kernel refuses a filter, and the copies' path no socket: {error}") from None

    @cached
    def recording(self) -> Recording:
        """Record the file system calls of a run, choose one of its saves, and return the recording.

        Raises:
            NotSeen: the run has no step, or fewer than two checkpoints.
            CannotTell: the recorded run fails or still runs at the time limit, or the recording is incomplete.
        """
        if not self.steps:
            raise NotSeen(f"no optimizer step: {ADAPTER}")
        work = self.copy()
        recorder = states.StateRecorder(work, self.new_path("states"))
        calls = self.calls(work, recorder)
        with self.job(work, calls=calls) as job:
            if not job.wait_for_end(self.patience()) or job.code:
                raise CannotTell(f"does not train to its end while it is recorded: {job.error_line()}")
            records = job.read()
            times = records.first_times()
        if calls.error:
            raise CannotTell(f"its folder cannot be recorded: {calls.error}")
        recorder.finish()
        found = states.saves(recorder.calls, times)
        save = states.chosen(found, len(self.steps))
        if save is None:
            raise NotSeen("one checkpoint only is written" if found else "no checkpoint is written in the folder")
        if not any(state.call >= save.calls[0] for state in recorder.states):
            raise CannotTell(f"its folder has too many files, or more than {states.RECORD_LIMIT / 1e6:g} MB of changes")
        moments = [recorder.calls[number].time for number in save.calls]
        line = records.line_of_save(moments[0], moments[-1])
        return Recording(recorder.calls, recorder.states, save, work, isinstance(calls, FilteredCalls), line)


def _first_difference(first: Sequence[object], second: Sequence[object]) -> int:
    for place, (one, two) in enumerate(zip(first, second)):
        if one != two:
            return place
    return min(len(first), len(second))


def warnings_in(output: str) -> int:
    """Return how many lines of an output are warnings or errors."""
    return sum(WARNING.search(line) is not None for line in output.splitlines())


def relative(a: float | None, b: float | None) -> float:
    """Return the relative difference of two numbers. None counts as 0."""
    one = a or 0.0
    two = b or 0.0
    return abs(one - two) / max(abs(one), abs(two), 1e-30)
