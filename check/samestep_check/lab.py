"""Run a checked script with and without faults, each time in a copy of its folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep import ConfigError
from samestep.options import Options

from samestep_check.job import Job, started
from samestep_check.records import Key, Records, Step
from samestep_check.source import Source

PATIENCE = 75.0  # seconds from a fault to an effect; torchrun waits 30 for ranks that it has told to end
MIN_RUN = 3.0  # seconds that the steps of a run with a fault take at least, by pauses after each step
CLOSE = 1e-4  # relative difference of norms that rounding may cause
LOSS = r"(?i)\bloss\b[ =:]+([-+.\deE]+|nan|inf)"
CHECKPOINT = r"(?i)\.(pt|pth|bin|safetensors|np[yz]|pkl|pdparams|pdopt|h5|distcp)\b|ckpt|checkpoint|snapshot"
ALLOWED = "/dev", "/proc", "/tmp", "~/.cache", "~/.config/matplotlib", "~/.triton", "~/.nv"  # noqa: S108  # without TMPDIR
NPROC = re.compile(r"^(--?nproc[-_]per[-_]node|--num[-_]processes|--nproc|-np|-n)(=(\d+))?$")


class Verdict(Exception):
    """A row's result other than passed."""


class Failed(Verdict):
    """The script does not survive the fault, or does what nobody wants."""


class CannotTell(Verdict):
    """The runs of the script do not decide it."""


class NotSeen(Verdict):
    """The script does not show what the row needs, from outside."""


@dataclass
class Faulted:
    """A run with a fault, and the restart after it."""

    done: int  # steps before the job's end
    struck: float
    code: int | None  # None if it had not ended
    took: float  # seconds from the fault to the end
    records: Records
    attempts: list[list[Step]]
    work: Path
    snapshot: Path  # a copy of ``work`` before the restart
    again_code: int | None = None
    again_words: str = ""
    again: list[Step] = field(default_factory=list)
    again_records: Records | None = None  # None if the launcher restarted the ranks
    in_place: bool = False  # no restart: the other ranks continue


def kept(function: Callable[[Lab], Any]) -> Any:
    """Return a property that is computed once; a verdict that it raises is raised again."""
    name = function.__name__

    def value(lab: Lab) -> Any:
        if name not in lab.results:
            try:
                lab.results[name] = function(lab)
            except Verdict as verdict:
                lab.results[name] = verdict
        if isinstance(lab.results[name], Verdict):
            raise lab.results[name]
        return lab.results[name]

    return property(value)


def _real_paths(places: Sequence[str | Path]) -> list[str]:
    """Return absolute paths without links. Without a home folder, a place in it (`~`) is left out."""
    expanded = [os.path.expanduser(place) for place in places]
    return [os.path.realpath(place) for place in expanded if not place.startswith("~")]


class Lab:
    """Runs the script, each run in a copy of its folder, and keeps what several rows need."""

    def __init__(self, options: Options, command: Sequence[str], temporary: Path) -> None:
        for name in ("loss_pattern", "checkpoint"):
            try:
                re.compile(getattr(options, name))
            except re.error as error:
                raise ConfigError(f"--{name.replace('_', '-')}: {error}: give a regular expression") from None
        if options.adapter and not options.adapter.is_file():
            raise ConfigError(f"--adapter {options.adapter}: the file is missing: name a Python file")
        try:
            self.commands = [*command], shlex.split(options.resume_command or "") or [*command]
        except ValueError as error:
            raise ConfigError(f"--resume-command: {error}: quote it as for a shell") from None
        self.options, self.folder, self.temporary = options, Path.cwd().resolve(), temporary
        caches = tempfile.gettempdir(), os.environ.get("XDG_CACHE_HOME", "/dev")
        places = [*(options.allow_write or []), *caches, *ALLOWED]
        self.config = {
            "source": str(self.folder),
            "allowed": _real_paths(places),
            "checkpoint": options.checkpoint,
            "adapter": str(options.adapter.resolve()) if options.adapter else None,
        }
        self.source = Source(self.folder, options.link or [])
        self.begun, self.count = time.monotonic(), 0
        self.row_end: float = self.begun + options.row_limit
        self.results: dict[str, Any] = {}
        self.steps: list[Step] = []  # of the undisturbed run
        self.left = 0  # processes that outlived their launchers
        self.n = next((int(number) for _, number in self._numbers(command)), 2)  # with {n}: 2
        self.other = options.other_n or self.n + 1
        self.source.check(options.copy_limit, temporary)

    def _numbers(self, command: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the places and values of the number of ranks in a command."""
        for i, word in enumerate(command):
            if match := NPROC.match(word):
                value = match[3] or (command[i + 1] if i + 1 < len(command) and not match[2] else "")
                if value.isdigit():
                    yield (i if match[3] else i + 1), value
                    return

    def command(self, n: int, again: bool = False) -> list[str]:
        """Return the command for ``n`` ranks: the launcher's option is replaced, and {64/n} is each rank's share."""
        command = [*self.commands[again]]
        places = [*self._numbers(command)]
        if n != self.n and not places and not any("{n}" in word for word in command):
            raise NotSeen("the command has no --nproc-per-node, --num-processes, -np, -n or {n} to change")
        for i, value in places:
            command[i] = command[i].removesuffix(value) + str(n)
        command = [re.sub(r"\{(\d+)/n\}", lambda match: str(int(match[1]) // n), word) for word in command]
        return [word.replace("{n}", str(n)) for word in command]

    def copy(self, source: Path | None = None) -> Path:
        """Copy a folder, the script's own by default."""
        self.count += 1
        work = self.temporary / f"work-{self.count}"
        if source is None:
            self.source.copy(work)
        else:
            shutil.copytree(source, work, symlinks=True)
        return work

    @contextmanager
    def job(self, work: Path, n: int | None = None, again: bool = False, **config: Any) -> Iterator[Job]:
        """Start the script in a copied folder."""
        self.count += 1
        records = self.temporary / f"records-{self.count}"
        command = self.source.in_copy(self.command(n or self.n, again), work)
        with started(command, work, records, {**self.config, **config}) as job:
            yield job
            self.left += job.left_behind

    def notes(self) -> list[str]:
        """Return lines for the head of the table: what the check could not see or copy, and the kit's parts in use."""
        found = []
        parts, unseen, awaited, imported = set[str](), set[str](), set[str](), set[str]()
        for notes in self.reference.notes():
            parts.update(notes.parts)
            unseen.update(notes.unseen)
            awaited.update(notes.awaited)
            imported.update(notes.imported)
        if parts:
            found.append(f"the script uses {', '.join(sorted(parts))} of samestep.torch")
        if any(notes.is_inferred for notes in self.reference.notes()):
            found.append("batches of steps are inferred from the loader")
        found += [f"the check could not see everything: {words}" for words in sorted(unseen)]
        found += [f"the adapter's function for {module} is never called" for module in sorted(awaited - imported)]
        if self.source.special:
            found.append(f"not copied, as they are no files: {', '.join(self.source.special)}")
        return found

    def patience(self) -> float:
        """Return the seconds that a run may take now."""
        left = self.begun + self.options.total_limit - time.monotonic()
        return max(1.0, min(self.row_end - time.monotonic(), float(left)))

    def undisturbed_at(self, n: int) -> Records:
        """Run the script without a fault to its end."""
        with self.job(self.copy(), n) as job:
            if not job.ended(self.patience()):
                raise CannotTell(f"at {n} ranks it does not end in {job.took:.0f} s")
            if job.code:
                verdict = Failed if n == self.n else CannotTell  # the script may fix the number elsewhere
                raise verdict(f"at {n} ranks: exit {job.code}: {job.last_words()}")
            self.took = job.took
            self.lines = len(re.findall(self.options.loss_pattern, job.said()))
            return job.read()

    @kept
    def reference(self) -> Records:
        records = self.undisturbed_at(self.n)
        self.steps = records.steps()
        self.total = len(self.steps) or self.lines
        return records

    def run_reference(self) -> None:
        """Run the script without a fault, and keep the records for the rows. Raises Verdict if it does not work."""
        _ = self.reference

    @kept
    def twin(self) -> Records:
        try:
            return self.undisturbed_at(self.n)
        except Verdict as verdict:
            raise CannotTell(f"differs from itself: the repetition: {verdict}") from None

    @kept
    def single(self) -> Records:
        return self.undisturbed_at(1)

    @kept
    def at_other(self) -> Records:
        return self.undisturbed_at(self.other)

    def samples(self) -> list[list[Key]]:
        """Return the examples of each step of the undisturbed run, which must equal its repetition."""
        if not self.steps:
            raise NotSeen("no optimizer step: give an --adapter that records them")
        first, second = ([step.indices for step in each] for each in (self.steps, self.twin.steps()))
        if any(indices is None for indices in first):
            reasons = {notes.reason for notes in self.reference.notes() if notes.reason}
            words = "; ".join(sorted(reasons)) or "examples without numbers"
            raise NotSeen(f"{words}: give an --adapter that records them")
        if first != second:
            k = next((k for k, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
            raise CannotTell(f"differs from itself by the samples of step {k + 1}")
        return [indices or [] for indices in first]

    def bound(self) -> float:
        """Return the largest relative difference of the weights that the script's own repetition explains."""
        twins = zip(self.steps, self.twin.steps())
        own = max((relative(a.weights, b.weights) for a, b in twins if a.weights and b.weights), default=0.0)
        if self.steps and relative(self.steps[0].weights_before, self.twin.steps()[0].weights_before) > CLOSE / 100:
            raise CannotTell("differs from itself by its first weights: set a seed")
        if own > 0.01:
            raise CannotTell(f"differs from itself by {own:.0e} of the weights")
        return max(CLOSE, 10 * own)

    def goal(self) -> int:
        """Return the step of a fault: the first after the checkpoint nearest to the middle."""
        saves = [save.step for save in self.reference.saves() if 0 < save.step < self.total - 1]
        return min(saves, key=lambda step: abs(step - self.total / 2)) + 1 if saves else max(1, self.total // 2)

    def pause(self, least: float = MIN_RUN) -> float:
        """Return the seconds to wait after each step, so that all steps take ``least`` seconds."""
        total = len(self.steps)
        return max(0.0, least - (self.steps[-1].time - self.steps[0].time)) / total if total else 0.0

    def middle(self, job: Job) -> None:
        """Wait until a job has come to the step of its fault."""
        if not self.total:
            raise NotSeen("neither a step nor a loss: give an --adapter, or a --loss-pattern")
        goal, pattern = self.goal(), self.options.loss_pattern
        job.wait(lambda: job.code is not None or job.progress(pattern) >= goal, self.patience())
        if job.code is not None or job.progress(pattern) < goal:
            raise CannotTell(f"it did not come to step {goal}: exit {job.code}: {job.last_words()}")

    def victim(self, job: Job) -> int:
        """Return the process of the last rank."""
        records = job.read()
        ranks = records.ranks() or {each.rank: [each] for each in records.processes if each.rank is not None}
        if not ranks:
            raise NotSeen("no process has a rank in its environment")
        return ranks[max(ranks)][-1].pid

    def faulted(self, strike: Callable[[Job], None] | None, **config: Any) -> Faulted:
        """Strike in the middle of a run, or by ``config``, and restart the script as its user would."""
        work = self.copy()
        with self.job(work, pause=self.pause(), **config) as job:
            if strike:
                self.middle(job)
                struck = time.time()
                strike(job)
            else:
                job.wait(lambda: job.code is not None, self.patience())
                struck = time.time()
            ended = job.ended(min(PATIENCE, self.patience()))
            records, code = job.read(), job.code if ended else None
            took, attempts = time.time() - struck, records.attempts()
        done = len(attempts[0]) if attempts else 0
        result = Faulted(done, struck, code, took, records, attempts, work, self.copy(work))
        if code == 0 and len(attempts) > 1:  # it restarted its ranks by itself
            result.again_code, result.again = 0, attempts[-1]
        elif code != 0:
            self.restart(result, work, self.n)
        return result

    def again(self, run: Faulted, n: int, change: Callable[[Path], None] = lambda work: None) -> Faulted:
        """Restart a run once more, in the same folder with the same content, after a ``change`` of it."""
        shutil.rmtree(run.work)
        shutil.copytree(run.snapshot, run.work, symlinks=True)
        change(run.work)
        result = replace(run)
        self.restart(result, run.work, n)
        return result

    def restart(self, result: Faulted, work: Path, n: int) -> None:
        with self.job(work, n, again=True) as job:
            ended = job.ended(self.patience())
            result.again_code, result.again_words = job.code if ended else None, job.last_words()
            result.again_records = job.read()
            result.again = result.again_records.steps()

    @kept
    def killed(self) -> Faulted:
        run = self.faulted(lambda job: os.kill(self.victim(job), signal.SIGKILL))
        if run.code == 0 and (later := run.records.continued(run.struck)):
            run.done = sum(step.time <= run.struck for step in run.attempts[0])
            run.in_place, run.again_code, run.again = True, 0, later
        return run

    @kept
    def stopped(self) -> Faulted:
        """Return the run with a killed rank, or if it recovered by itself, one with all its processes killed."""
        return self.killed if self.killed.code else self.faulted(kill_all)

    @kept
    def terminated(self) -> Faulted:
        return self.faulted(lambda job: job.process.terminate())


def kill_all(job: Job) -> None:
    for pid in job.left():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def relative(a: float | None, b: float | None) -> float:
    return abs((a or 0.0) - (b or 0.0)) / max(abs(a or 0.0), abs(b or 0.0), 1e-30)
