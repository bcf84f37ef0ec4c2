"""The rows of a check: each injects a fault or asks a question, and returns in words what it saw.

A row that passes returns; the other verdicts are exceptions. Rows share runs: `Lab` keeps them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from samestep import ConfigError
from samestep.check.job import Job, Records, Step, started

PATIENCE = 60.0  # seconds from a fault to an effect; torchrun waits 30 for ranks that it has told to end
IN_FLIGHT = 3  # steps that ranks may record after a fault although none continues
MIN_RUN = 3.0  # seconds that the steps of a run with a fault take at least, by pauses after each step
CLOSE = 1e-4  # relative difference of norms that rounding may cause
SKIPPED = ".git", ".tox", ".venv", ".venvs", "__pycache__", "node_modules"
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
class Settings:
    """Hold the command to check, and the options of `samestep check`."""

    command: list[str]
    resume_command: list[str]
    folder: Path
    temporary: Path
    other_n: int | None = None
    adapter: Path | None = None
    loss_pattern: str = r"(?i)\bloss\b[ =:]+([-+.\deE]+|nan|inf)"
    checkpoint: str = (
        r"\.(pt|pth|ckpt|bin|safetensors|np[yz]|pkl|pdparams|pdopt|h5|distcp)\b|(?i:ckpt|checkpoint|snapshot)"
    )
    allowed: list[Path] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    copy_limit: float = 200e6  # bytes
    row_limit: float = 120.0  # seconds
    total_limit: float = 900.0


@dataclass
class Faulted:
    """A run with a fault, and the restart after it."""

    done: int  # steps before the job's end
    struck: float
    code: int | None  # None if it had not ended
    took: float  # seconds from the fault to the end
    records: Records
    attempts: list[list[Step]]
    snapshot: Path
    again_code: int | None = None
    again_words: str = ""
    again: list[Step] = field(default_factory=list)


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


class Lab:
    """Runs the script, each run in a copy of its folder, and keeps what several rows need."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.begun, self.count = settings, time.monotonic(), 0
        self.row_end = self.begun + settings.row_limit
        self.results: dict[str, Any] = {}
        self.steps: list[Step] = []  # of the undisturbed run
        self.left = 0  # processes that outlived their launchers
        self.n = next((int(number) for _, number in self._numbers(settings.command)), 0)
        self.other = settings.other_n or self.n + 1

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
        command = [*(self.settings.resume_command if again else self.settings.command)]
        places = [*self._numbers(command)]
        if n != self.n and not places:
            raise NotSeen("the command has no --nproc-per-node, --num-processes, -np or -n to change")
        for i, value in places:
            command[i] = command[i].removesuffix(value) + str(n)
        command = [re.sub(r"\{(\d+)/n\}", lambda match: str(int(match[1]) // (n or 1)), word) for word in command]
        return [word.replace("{n}", str(n)) for word in command]

    def copy(self, source: Path | None = None) -> Path:
        """Copy a folder, the script's own by default."""
        self.count += 1
        work = self.settings.temporary / f"work-{self.count}"
        shutil.copytree(source or self.settings.folder, work, symlinks=True, ignore=self._ignored)
        for link in self.settings.links:
            if not (work / link).is_symlink():
                (work / link).symlink_to((self.settings.folder / link).resolve())
        return work

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        links = {str(self.settings.folder / link) for link in self.settings.links}
        return {name for name in names if name in SKIPPED or os.path.join(folder, name) in links}

    def check_size(self) -> None:
        """Raise ConfigError if the script's folder is too large to copy for each run."""
        size = 0
        for folder, folders, names in os.walk(self.settings.folder):
            ignored = self._ignored(folder, [*folders, *names])
            folders[:] = [name for name in folders if name not in ignored]
            size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names if name not in ignored)
            if size > self.settings.copy_limit:
                limit = self.settings.copy_limit / 1e6
                raise ConfigError(f"the folder is larger than {limit:g} MB: link data by --link, or raise --copy-limit")

    @contextmanager
    def job(self, work: Path, n: int | None = None, again: bool = False, **config: Any) -> Iterator[Job]:
        """Start the script in a copied folder."""
        shared = {
            "source": str(self.settings.folder),
            "allowed": [str(path) for path in self.settings.allowed],
            "checkpoint": self.settings.checkpoint,
            "adapter": str(self.settings.adapter) if self.settings.adapter else None,
        }
        self.count += 1
        records = self.settings.temporary / f"records-{self.count}"
        with started(self.command(n or self.n, again), work, records, {**shared, **config}) as job:
            yield job
            self.left += job.left_behind

    def patience(self) -> float:
        """Return the seconds that a run may take now."""
        left = self.begun + self.settings.total_limit - time.monotonic()
        return max(1.0, min(self.row_end - time.monotonic(), left))

    def undisturbed_at(self, n: int) -> Records:
        """Run the script without a fault to its end."""
        with self.job(self.copy(), n) as job:
            if not job.ended(self.patience()):
                raise CannotTell(f"at {n} ranks it does not end in {job.took:.0f} s")
            if job.code:
                raise Failed(f"at {n} ranks: exit {job.code}: {job.last_words()}")
            self.lines = len(re.findall(self.settings.loss_pattern, job.said()))
            return job.read()

    @kept
    def reference(self) -> Records:
        records = self.undisturbed_at(self.n)
        self.steps = records.steps()
        self.total = len(self.steps) or self.lines
        return records

    @kept
    def twin(self) -> Records:
        return self.undisturbed_at(self.n)

    @kept
    def single(self) -> Records:
        return self.undisturbed_at(1)

    @kept
    def at_other(self) -> Records:
        return self.undisturbed_at(self.other)

    def samples(self) -> list[list[int]]:
        """Return the examples of each step of the undisturbed run, which must equal its repetition."""
        if not self.steps:
            raise NotSeen("no optimizer step: give an --adapter that records them")
        first, second = ([step.indices for step in each] for each in (self.steps, self.twin.steps()))
        if any(indices is None for indices in first):
            raise NotSeen("examples without numbers: give an --adapter that records them")
        if first != second:
            k = next((k for k, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
            raise CannotTell(f"differs from itself by the samples of step {k + 1}")
        return [indices or [] for indices in first]

    def bound(self) -> float:
        """Return the largest relative difference of the weights that the script's own repetition explains."""
        twins = zip(self.steps, self.twin.steps())
        own = max((relative(a.weights, b.weights) for a, b in twins if a.weights and b.weights), default=0.0)
        if own > 0.01:
            raise CannotTell(f"differs from itself by {own:.0e} of the weights")
        return max(CLOSE, 10 * own)

    def goal(self) -> int:
        """Return the step of a fault: the first after the checkpoint nearest to the middle."""
        saves = [save.step for save in self.reference.saves() if 0 < save.step < self.total - 1]
        return min(saves, key=lambda step: abs(step - self.total / 2)) + 1 if saves else max(1, self.total // 2)

    def pause(self) -> float:
        """Return the seconds to wait after each step, so that a fault comes in time."""
        total = len(self.steps)
        return max(0.0, MIN_RUN - (self.steps[-1].time - self.steps[0].time)) / total if total else 0.0

    def middle(self, job: Job) -> None:
        """Wait until a job has come to the step of its fault."""
        goal, pattern = self.goal(), self.settings.loss_pattern
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
        result = Faulted(done, struck, code, took, records, attempts, self.copy(work))
        if code == 0 and len(attempts) > 1:  # it restarted its ranks by itself
            result.again_code, result.again = 0, attempts[-1]
        elif code != 0:
            self.restart(result, work, self.n)
        return result

    def restart(self, result: Faulted, work: Path, n: int) -> None:
        with self.job(work, n, again=True) as job:
            ended = job.ended(self.patience())
            result.again_code, result.again_words = job.code if ended else None, job.last_words()
            result.again = job.read().steps()

    @kept
    def killed(self) -> Faulted:
        return self.faulted(lambda job: os.kill(self.victim(job), signal.SIGKILL))

    @kept
    def terminated(self) -> Faulted:
        return self.faulted(lambda job: job.process.terminate())


def relative(a: float | None, b: float | None) -> float:
    return abs((a or 0.0) - (b or 0.0)) / max(abs(a or 0.0), abs(b or 0.0), 1e-30)


def restarted(lab: Lab, run: Faulted) -> None:
    """Raise Failed if the script did not restart to its end."""
    if run.again_code is None:
        raise Failed("the restart does not end")
    if run.again_code:
        raise Failed(f"the restart fails: exit {run.again_code}: {run.again_words}")
    if lab.steps and not run.again and run.done < len(lab.steps):
        raise Failed("the restart takes no step")


def resumed_at(lab: Lab, run: Faulted, saved: Sequence[int]) -> int:
    """Return the step at which a restart resumed. Raise Failed if its samples differ from the undisturbed run."""
    restarted(lab, run)
    samples, again = lab.samples(), [step.indices for step in run.again]
    for at in saved:
        if again == samples[at:]:
            return at
    at = max(0, len(samples) - len(again))
    if again == samples[at:] and not saved:
        if at == 0:
            raise Failed(f"starts over at step 0 of {len(samples)}; {run.done} steps lost")
        return at
    before = samples[: saved[0] if saved else at]
    wanted = Counter(i for step in samples for i in step)
    trained = Counter(i for step in [*before, *again] for i in step or ())
    repeated, lost = (trained - wanted).total(), (wanted - trained).total()
    where = f"saved at step {saved[0]}, resumes at step {at}" if saved else f"resumes at step {at}"
    raise Failed(f"{where}: {repeated} samples repeated, {lost} lost")


def saved_at(run: Faulted) -> list[int]:
    """Return the steps of the checkpoints that a restart may resume, the newest first."""
    saves = [save for save in run.records.saves() if save.time < run.struck + run.took]
    late = [save for save in saves[:-1] if saves[-1].time > run.struck - 0.5]  # the newest may not be whole
    return list(dict.fromkeys(save.step for save in [*saves[-1:], *reversed(late)]))[:2]


# --- the rows --------------------------------------------------------------------------------------------------------


def rank_killed(lab: Lab) -> str:
    run = lab.killed
    if run.code is None:
        raise Failed(f"the job has not ended {run.took:.0f} s after")
    if run.code == 0 and len(run.attempts) < 2:
        raise Failed(f"exit 0 after {run.done} of {len(lab.steps)} steps")
    restarted(lab, run)
    if run.code == 0:
        return "resumes by itself"
    return f"the job ends after {run.took:.1f} s, exit {run.code}; the restart trains to the end"


def launcher_killed(lab: Lab) -> str:
    with lab.job(lab.copy(), pause=lab.pause()) as job:
        lab.middle(job)
        struck = time.time()
        job.process.kill()
        gone = job.wait(lambda: not job.left(), min(PATIENCE, lab.patience()))
        after = [step for step in job.read().steps() if step.time > struck]
        if not gone:
            raise Failed(f"{len(job.left())} processes left {time.time() - struck:.0f} s after")
        if len(after) > IN_FLIGHT:
            raise Failed(f"the ranks take {len(after)} more steps without their launcher")
        return f"all ranks end within {time.time() - struck:.1f} s"


def term(lab: Lab) -> str:
    run = lab.terminated
    if run.code is None:
        raise Failed(f"does not end in {run.took:.0f} s")
    if len(lab.steps) and run.done >= len(lab.steps):
        raise Failed(f"ignores TERM and trains to the end; exit {run.code}")
    if run.code == 0:
        raise Failed(f"exit 0 after {run.done} of {len(lab.steps)} steps: a scheduler takes it as done")
    words = f"ends after {run.took:.1f} s, exit {run.code}"
    at = resumed_at(lab, run, saved_at(run))
    if at < run.done:
        raise Failed(f"{words}; {run.done - at} of {run.done} steps lost")
    return f"{words}; no step lost"


def stalled(lab: Lab) -> str:
    with lab.job(lab.copy(), pause=lab.pause()) as job:
        lab.middle(job)
        struck = time.time()
        os.kill(lab.victim(job), signal.SIGSTOP)
        if not job.ended(min(PATIENCE, lab.patience())):
            raise Failed(f"hangs: no end in {time.time() - struck:.0f} s")
        return f"the job ends after {time.time() - struck:.0f} s, exit {job.code}"


def save_killed(lab: Lab) -> str:
    saves = lab.reference.opens()
    kind = "open" if any(save.kind == "open" for save in saves) else "rename"
    saves = [save for save in saves if save.kind == kind]
    later = [k for k, save in enumerate(saves, 1) if save.step > saves[0].step]
    if not later:
        raise NotSeen(f"{'one checkpoint only' if saves else 'no checkpoint'} is written where Python sees it")
    run = lab.faulted(None, kill_at=kind, kill_save=later[0])
    complete = [save.step for save in run.records.saves() if save.step < saves[later[0] - 1].step]
    at = resumed_at(lab, run, complete[::-1] or [0])
    return f"killed at the {kind} of the checkpoint of step {saves[later[0] - 1].step}; resumes at step {at}"


def checkpoint_damaged(lab: Lab) -> str:
    first = lab.killed
    restarted(lab, first)  # without damage
    run, work = replace(first), lab.copy(first.snapshot)
    files: list[Path] = []
    for save in sorted(first.records.saves(), key=lambda save: save.time):
        with suppress(ValueError):  # a path outside of the copied folder
            path = work.joinpath(*Path(save.path).relative_to(lab.settings.temporary).parts[1:])
            files = [each for each in [path, *path.rglob("*")] if each.is_file()] or files
    if not files:
        raise NotSeen("no checkpoint is written where Python sees it")
    name = damage(max(files, key=lambda path: path.stat().st_size))
    lab.restart(run, work, lab.n)
    if run.again_code:
        return f"a byte of {name}: refused, exit {run.again_code}: {run.again_words}"
    restarted(lab, run)
    at = len(lab.steps) - len(run.again)
    if at <= 0:
        raise Failed(f"a byte of {name}: starts over at step 0")
    if at >= len(lab.steps) - len(first.again):
        raise Failed(f"a byte of {name}: loaded without a word")
    return f"a byte of {name}: resumes an older one, at step {at}"


def damage(path: Path) -> str:
    """Flip a byte in the middle of a file, or of the largest member of a zip, such as torch.save writes."""
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            data = [each for each in archive.infolist() if "/data/" in each.filename] or archive.infolist()
        entry = max(data, key=lambda each: each.compress_size)
        names = entry.header_offset + 26  # the lengths of its name and of its extra field
        sizes = (int.from_bytes(content[i : i + 2], "little") for i in (names, names + 2))
        place = entry.header_offset + 30 + sum(sizes) + entry.compress_size // 2
    content[place] ^= 0x40
    path.write_bytes(content)
    return path.name


def resume_position(lab: Lab) -> str:
    at = resumed_at(lab, lab.killed, saved_at(lab.killed))
    return f"resumes at step {at} of {len(lab.steps)}, sample for sample"


def resume_optimizer(lab: Lab) -> str:
    run, bound = lab.killed, lab.bound()
    restarted(lab, run)
    if not run.again or run.again[0].state is None:
        raise NotSeen("no optimizer of torch")
    at = len(lab.steps) - len(run.again)
    if not 0 < at < len(lab.steps):
        raise Failed("starts over at step 0: nothing is restored")
    wanted, found = lab.steps[at], run.again[0]
    if found.lr != wanted.lr:
        raise Failed(f"learning rate {found.lr[0]:g} at step {at + 1}, {wanted.lr[0]:g} undisturbed")
    if wanted.state and found.state[0] < wanted.state[0]:
        raise Failed(f"the optimizer has {found.state[0]:g} tensors of state, {wanted.state[0]:g} undisturbed")
    for name, a, b in (
        ("weights", found.weights_before, wanted.weights_before),
        ("optimizer's state", found.state[1], (wanted.state or [0, 0])[1]),
    ):
        if relative(a, b) > bound:
            raise Failed(f"the {name} differ by {relative(a, b):.0e} at step {at + 1}")
    rates = [k for k, (a, b) in enumerate(zip(run.again, lab.steps[at:]), at + 1) if a.lr != b.lr]
    if rates:
        raise Failed(f"learning rate differs from step {rates[0]} on")
    return f"learning rate {found.lr[0]:g}, {found.state[0]:g} tensors of state, as undisturbed"


def other_n(lab: Lab) -> str:
    first = lab.killed
    run = replace(first)
    lab.command(lab.other, again=True)
    lab.restart(run, lab.copy(first.snapshot), lab.other)
    at = resumed_at(lab, run, saved_at(first))
    return f"at {lab.other} ranks: resumes at step {at}, with the same samples"


def same_at_one(lab: Lab) -> str:
    samples = lab.samples()
    single = lab.single.steps()
    alone = [step.indices or [] for step in single]
    if len(single) != len(samples) or len(alone[0]) != len(samples[0]):
        sizes = f"a step has {len(alone[0]) if alone else 0} samples at 1 rank, {len(samples[0])} at {lab.n}"
        raise CannotTell(f"{sizes}: write a rank's batch as {{{len(samples[0])}/n}}")
    other = next((k for k, (a, b) in enumerate(zip(alone, samples)) if a != b), None)
    if other is not None:
        raise Failed(f"step {other + 1} has other samples at 1 rank than at {lab.n}")
    words = f"same samples in all {len(samples)} steps"
    if any(a.random != b.random for a, b in zip(single, single[1:]) if a.epoch == b.epoch):
        return f"{words}; weights not compared, as steps draw random numbers"
    bound = lab.bound()
    for name in ("weights", "loss"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(single, lab.steps)]
        gaps = [relative(a, b) for a, b in pairs if a is not None and b is not None]
        if gaps and max(gaps) > bound:
            first = next(k for k, gap in enumerate(gaps, 1) if gap > bound)
            raise Failed(f"{words}, but the {name} differ by {gaps[first - 1]:.0e} from step {first} on")
        if gaps:
            return f"{words}, {name} within {max(gaps):.0e}"
    return f"{words}; weights and losses not seen"


def odd_batch(lab: Lab) -> str:
    samples, bound = lab.samples(), lab.bound()
    odd = [k for k, step in enumerate(lab.steps) if len({*step.shards}) > 1]
    epochs: dict[int, Counter[int]] = {}
    for step, indices in zip(lab.steps, samples):
        epochs.setdefault(step.epoch, Counter()).update(indices)
    repeated = max((count.total() - len(count) for count in epochs.values()), default=0)
    if repeated:
        raise Failed(f"{repeated} samples are repeated in an epoch, to fill the last batch")
    if not odd:
        last = {sum(step.shards) for step in lab.steps}
        raise CannotTell(f"all shards are equal, in batches of {', '.join(map(str, sorted(last)))}: use other sizes")
    single = lab.single.steps()
    if [step.indices for step in single] != samples:
        raise CannotTell("other samples at 1 rank")
    if any(a.random != b.random for a, b in zip(single, single[1:]) if a.epoch == b.epoch):
        raise CannotTell("steps draw random numbers, so that weights at 1 rank differ")
    k, shards = odd[0], " and ".join(map(str, lab.steps[odd[0]].shards))
    pairs = [(each.weights_before, each.weights) for each in (lab.steps[k], single[k])]
    if None in pairs[0]:
        raise NotSeen("the weights")
    (before, after), (alone_before, alone_after) = pairs
    if relative(before, alone_before) <= bound < relative(after, alone_after):
        raise Failed(f"step {k + 1} has shards of {shards}: its mean is not the mean over samples")
    return f"step {k + 1} has shards of {shards}, and no sample is repeated"


def epoch_order(lab: Lab) -> str:
    first = next(iter(lab.reference.ranks().values()), None)
    if first is None or any(step.indices is None for step in lab.steps):
        raise NotSeen("the examples of steps: give an --adapter that records them")
    epochs: dict[int, list[int]] = {}
    for step, shard in zip(lab.steps, first[0].steps):
        epochs.setdefault(step.epoch, []).extend(shard["indices"])
    if len(epochs) < 2:
        raise NotSeen("fewer than two epochs")
    one, two, *_ = epochs.values()
    if one == sorted(one):
        raise CannotTell("the examples come in stored order")
    if one == two:
        raise Failed(f"both epochs have the same order: {', '.join(map(str, one[:5]))}...")
    return f"{len(epochs)} epochs in {len(set(map(str, epochs.values())))} orders"


def evaluation(lab: Lab) -> str:
    records, n = lab.reference, lab.n
    found = records.evaluations()
    if not found:
        raise NotSeen("no evaluation by a DataLoader, or by an adapter")
    if found[-1].size % n == 0:
        n = lab.other
        if found[-1].size % n == 0:
            raise CannotTell(f"{lab.n} and {n} ranks divide {found[-1].size} examples: choose --other-n")
        found = lab.at_other.evaluations()
    counts, size = found[-1]
    often = max(Counter(counts.values()).items(), key=lambda pair: pair[1])[0]
    more, missing = sum(count - often for count in counts.values() if count > often), size - len(counts)
    if more or missing:
        raise Failed(f"at {n} ranks {more} of {size} examples count twice, {missing} are missing")
    return f"at {n} ranks each of {size} examples counts {'once' if often == 1 else f'{often} times'}"


def two_jobs(lab: Lab) -> str:
    with lab.job(lab.copy(), pause=lab.pause()) as first:
        first.wait(lambda: first.code is not None or first.progress(lab.settings.loss_pattern), lab.patience())
        with lab.job(lab.copy()) as second:
            ended = [job.ended(lab.patience()) for job in (second, first)]
            for name, job, done in zip(("second", "first"), (second, first), ended):
                if not done or job.code:
                    raise Failed(f"the {name} job {f'exit {job.code}' if done else 'hangs'}: {job.last_words()}")
    return "both end with exit 0"


def exit_codes(lab: Lab) -> str:
    kill, stop = lab.killed, lab.terminated
    words = f"undisturbed 0, a killed rank {kill.code}, TERM {stop.code}"
    if (kill.code == 0 and len(kill.attempts) < 2) or (stop.code == 0 and stop.done < len(lab.steps)):
        raise Failed(f"{words}: 0 although it is not done")
    return words.replace("None", "no end")


def leftovers(lab: Lab) -> str:
    for run in (lab.killed, lab.terminated):
        if run.code is None:
            raise Failed(f"the job has not ended {run.took:.0f} s after a fault")
    if lab.left:
        raise Failed(f"{lab.left} processes outlive their launcher by 5 s")
    return "no process outlives its launcher by 5 s"


def recovery_time(lab: Lab) -> str:
    restarted(lab, lab.killed)
    if not lab.killed.again:
        raise NotSeen("no optimizer step: give an --adapter that records them")
    first = lab.killed.again[0].time - lab.killed.struck
    return f"{first:.1f} s from the kill to the next step, {lab.killed.took:.1f} s of them until the job ended"


def lost_work(lab: Lab) -> str:
    words = []
    for name, run in (("killed rank", lab.killed), ("TERM", lab.terminated)):
        restarted(lab, run)
        if not lab.steps:
            raise NotSeen("no optimizer step: give an --adapter that records them")
        at = len(lab.steps) - len(run.again) if run.code else run.done
        words.append(f"{name}: {max(0, run.done - at)} of {run.done} steps repeated")
        if at <= 0:
            raise Failed(f"{name}: all {run.done} steps lost")
    return "; ".join(words)


class Row(NamedTuple):
    """A row: its title, the function that decides it, the usual cause of a failure, and the page that mends it."""

    title: str
    decide: Callable[[Lab], str]
    cause: str
    page: str


# fmt: off
ROWS = {
    "rank-killed": Row(
        "A rank is killed", rank_killed,
        "no checkpoint, or a restart that does not find it", "docs/recovery.md"),
    "term": Row(
        "TERM to the job", term,
        "no handler that saves, or a launcher that does not pass it", "docs/signals.md"),
    "resume-position": Row(
        "Samples after a resume", resume_position,
        "the position in the epoch is not saved", "docs/own_loop.md"),
    "resume-optimizer": Row(
        "Learning rate and optimizer after a resume", resume_optimizer,
        "the optimizer's or the scheduler's state_dict is not saved", "docs/own_loop.md"),
    "odd-batch": Row(
        "A batch that N does not divide", odd_batch,
        "DistributedSampler pads, or DDP averages over ranks", "docs/same_step.md"),
    "epoch-order": Row(
        "Order of two epochs", epoch_order,
        "sampler.set_epoch(epoch) is not called", "docs/concepts.md"),
    "evaluation": Row(
        "An evaluation that N does not divide", evaluation,
        "DistributedSampler pads the evaluation set", "docs/same_step.md"),
    "one-rank": Row(
        "N = 1 against N", same_at_one,
        "random numbers by rank, or means over ranks", "docs/same_step.md"),
    "exit-codes": Row(
        "Exit codes", exit_codes,
        "an error that is caught, or sys.exit(0)", "docs/exit_codes.md"),
    "leftovers": Row(
        "Processes left", leftovers,
        "ranks that do not notice the launcher's end", "docs/signals.md"),
    "recovery-time": Row(
        "Seconds to recover", recovery_time,
        "no restart to the end", "docs/recovery.md"),
    "lost-work": Row(
        "Steps lost or repeated", lost_work,
        "checkpoints are rare, or not found", "docs/recovery.md"),
    "launcher-killed": Row(
        "The launcher is killed", launcher_killed,
        "ranks do not notice that their parent died", "docs/signals.md"),
    "stalled": Row(
        "A rank is stopped (SIGSTOP)", stalled,
        "the timeout of collectives is 30 minutes", "docs/hangs.md"),
    "save-killed": Row(
        "Killed while saving", save_killed,
        "the checkpoint is written in place, not renamed", "docs/recovery.md"),
    "checkpoint-damaged": Row(
        "The newest checkpoint is damaged", checkpoint_damaged,
        "no checksum is stored", "docs/recovery.md"),
    "other-n": Row(
        "Resume at another N", other_n,
        "the state is saved by rank", "docs/running.md"),
    "two-jobs": Row(
        "Two jobs at once", two_jobs,
        "a fixed port", "docs/troubleshooting.md"),
}
# fmt: on
QUICK = tuple(ROWS)[:12]
