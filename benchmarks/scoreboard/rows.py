"""The rows of the scoreboard: a fault, or a question, and one program's result, in a few words and numbers."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from job import Job, Told, started
from subjects import Setting, Subject, steps_taken

LIMIT = 300.0  # seconds for a job, which takes 10 to 60 by itself.
GRACE = 5.0  # Seconds after a job's end until its processes must have ended too.
IN_FLIGHT = 3  # Steps that ranks may record after a fault although none continues.
WAIT_NOTICE_AFTER = 45.0  # Seconds after a fault for an effect.
EPOCHS, MIDDLE = 3, 0.75  # The fault strikes early in the last epoch of three.


class NotDoneError(Exception):
    """A job did not reach the point of its fault, so the cell has no result."""


@dataclass
class Place:
    """A folder with a program in it, and the jobs that were started there in turn."""

    subject: Subject
    folder: Path
    shared: Path  # what several rows need is made once, and kept here

    @contextmanager
    def job(self, setting: Setting, again: bool = False) -> Iterator[Job]:
        starts = self.subject.starts(setting, self.folder, again)
        told = self.folder / f"told-{len([*self.folder.glob('told-?')])}"
        with started(starts, self.folder, told, self.subject.environ(setting)) as job:
            yield job

    def told(self) -> Told:
        return self.subject.told(self.folder)

    def middle(self, job: Job, setting: Setting) -> None:
        """Wait until the job is past its middle."""
        goal = int(self.subject.steps(setting) * MIDDLE)
        job.wait(lambda: job.done() or self.subject.taken(job, self.folder) >= goal, LIMIT)
        if (taken := self.subject.taken(job, self.folder)) < goal:
            raise NotDoneError(f"it came to step {taken}, not to {goal}; {codes(job)}: {last_words(job)}")

    def settled(self, job: Job) -> int:
        """How many steps it had taken when the fault struck: it is given the time to tell of the last."""
        time.sleep(0.5)
        return self.subject.taken(job, self.folder)


def setting_of(subject: Subject, n: int = 2, epochs: int = EPOCHS, batch: int | None = None) -> Setting:
    return Setting(n, epochs, batch or subject.batch)


def codes(job: Job) -> str:
    """The exit code of the launcher, as a shell has it."""
    found = [each.poll() for each in job.launchers]
    shown = ["none" if code is None else str(128 - code if code < 0 else code) for code in found]
    return "exit " + " and ".join(shown)


def left_behind(job: Job) -> str:
    """Of an ended job, what is still there after a while."""
    job.wait(lambda: not job.left(), GRACE)
    left = len(job.left())
    return f", {left} process{'es' * (left > 1)} left" if left else ""


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def last_words(job: Job) -> str:
    """Return the line of a job's output that has its error."""
    lines = [line.strip() for line in job.said().splitlines()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?(error: |[\w.]*(Error|Exception)\b)", line)]
    return re.sub(r"\s+", " ", errors[0]).partition(". ")[0][:160].replace("|", "/") if errors else ""


def sample_words(place: Place, setting: Setting, told: Told) -> str:
    """Over a whole training, of the weights at its end."""
    if not place.subject.epochs_told:
        return ""
    every = sorted({i for step in told.steps() for i in step.indices})
    repeated, lost = told.repeated_and_lost(every, setting.epochs)
    return f"samples repeated {repeated:,}, lost {lost:,}"


def restarted(place: Place, setting: Setting, done: int) -> str:
    """Restart it as its user would, and return where it resumes."""
    total = place.subject.steps(setting)
    with place.job(setting, again=True) as job:
        if not job.wait(job.done, LIMIT):
            return f"restarted: not ended after {seconds(LIMIT)}"
        if any(each.returncode for each in job.launchers):
            return f"restarted: {codes(job)}: {last_words(job)}"
    first = resumed_at(place, job, setting)
    words = f"restarted: resumes at step {first} of {total}, {max(0, done - first)} of {done} lost"
    return ", ".join(filter(None, [words, sample_words(place, setting, place.told())]))


def resumed_at(place: Place, job: Job, setting: Setting) -> int:
    """The number of the step, of a training at this number of ranks, at which a job began."""
    if place.subject.name == "mnist_ddp":
        found = re.search(r'"resumed_from_step": (\d+)', job.said())
        return int(found[1]) if found else 0
    steps = Told.read(job.told).steps()
    if not steps:
        return 0
    length = place.subject.steps(setting) // setting.epochs
    epoch, batch = steps[0].position
    return epoch * length + batch


def killed(place: Place, setting: Setting) -> int:
    """All of a job killed at once, in the middle, as by a power cut; returns how many steps it had taken."""
    shared = place.shared / f"{place.subject.name}-killed"
    if shared.exists():
        shutil.copytree(shared, place.folder, dirs_exist_ok=True)
        return int((shared / "done.txt").read_text())
    with place.job(setting) as job:
        place.middle(job, setting)
        for pid in job.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        done = place.settled(job)
    (place.folder / "done.txt").write_text(str(done))
    shutil.copytree(place.folder, shared)
    return done


def killed_rank(place: Place) -> str:
    """SIGKILL to the last rank, in the middle."""
    subject, setting = place.subject, setting_of(place.subject)
    with place.job(setting) as job:
        place.middle(job, setting)
        victim = subject.victim(place.told(), place.folder)
        before = {step.pid for step in place.told().steps()}
        assert victim is not None
        struck = time.time()
        os.kill(victim, signal.SIGKILL)
        done = place.settled(job)
        if subject.name == "mnist_ddp":
            job.wait(lambda: job.done() or subject.anew(place.folder), LIMIT)
            took = time.time() - struck
            job.wait(job.done, LIMIT)
            return ours_recovered(place, job, setting, done, took)
        ended = job.wait(job.done, LIMIT)
        took = time.time() - struck
        told = place.told()
        if not ended:
            return f"neither ended nor done {seconds(took)} after"
        good = not any(each.returncode for each in job.launchers)
        if good:
            return recovered(place, job, setting, told, struck, before, done)
        words = f"job ends, {codes(job)}, {seconds(took)}{left_behind(job)}"
    if not subject.saves:
        return f"{words}; nothing is saved: all {done} steps lost"
    return f"{words}; {restarted(place, setting, done)}"


def recovered(place: Place, job: Job, setting: Setting, told: Told, struck: float, before: set[int], done: int) -> str:
    """Describe a job that continued by itself to its end."""
    after = [step for step in told.steps() if step.time > struck]
    old, new = ([step for step in after if (step.pid in before) == kind] for kind in (True, False))
    if place.subject.heals:
        times = [struck, *(step.time for step in old)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        words = f"continues without it after {seconds(max(gaps, default=0.0))}"
        if new:
            words += f", the rank is back after {seconds(new[0].time - struck)}"
        alone = sum(1 for step in old if not new or step.time < new[0].time)
        words += f"; no step lost, {alone} made without the lost rank's samples"
        return "; ".join(filter(None, [words, sample_words(place, setting, told), codes(job)]))
    if not new:
        return f"{codes(job)}, no further step"
    length = place.subject.steps(setting) // setting.epochs
    at = new[0].position[0] * length + new[0].position[1]
    words = f"resumes by itself after {seconds(new[0].time - struck)} at step {at}, {max(0, done - at)} of {done} lost"
    return f"{words}; {sample_words(place, setting, told)}; {codes(job)}"


def ours_recovered(place: Place, job: Job, setting: Setting, done: int, took: float) -> str:
    """By its own log: the line of its restart has the step, and the result the hash of its weights."""
    said = job.said()
    at = re.findall(r"steps (\d+) to \d+", said)
    restarts = re.search(r'"restarts": (\d+)', said)
    if not restarts or len(at) < 2:
        return f"{codes(job)}: {last_words(job)}"
    lost = max(0, done - int(at[-1]))
    words = f"resumes by itself after {seconds(took)} at step {at[-1]}, {lost} of {done} lost"
    return f"{words}; {sample_words(place, setting, place.told())}; {codes(job)}"


def killed_launcher(place: Place) -> str:
    """SIGKILL to the process that was started."""
    setting = setting_of(place.subject)
    with place.job(setting) as job:
        place.middle(job, setting)
        struck = time.time()
        job.launcher.kill()
        job.launcher.wait()
        gone = job.wait(lambda: not job.left() if len(job.launchers) == 1 else job.done(), WAIT_NOTICE_AFTER)
        took, left = time.time() - struck, len(job.left())
        after = [step for step in place.told().steps() if step.time > struck + 1]
        ended = steps_taken(place.told()) >= place.subject.steps(setting)
        if len(job.launchers) > 1:
            return f"the others continue to the end; {codes(job)}" if gone else f"{left} processes left"
        if gone and ended:
            return f"the ranks continue without it to the end ({seconds(took)}), and end"
        if gone:
            return f"all ranks gone within {seconds(took)}"
        return f"{left} processes left after {seconds(took)}, {'still training' if after else 'not training'}"


def told_to_stop(place: Place) -> str:
    """SIGTERM to the process that was started."""
    setting = setting_of(place.subject)
    with place.job(setting) as job:
        place.middle(job, setting)
        struck = time.time()
        job.launcher.terminate()
        done = place.settled(job)
        ended = job.wait(lambda: job.launcher.poll() is not None, WAIT_NOTICE_AFTER)
        took = time.time() - struck
        if len(job.launchers) > 1:
            job.wait(job.done, WAIT_NOTICE_AFTER)
            return f"{seconds(took)}; the others continue to the end; {codes(job)}" if ended else "does not end"
        if not ended:
            return f"does not end in {seconds(took)}"
        words = f"{codes(job)}, {seconds(took)}{left_behind(job)}"
    if not place.subject.saves:
        return f"{words}; nothing is saved: all {done} steps lost"
    return f"{words}; {restarted(place, setting, done)}"


def stalled(place: Place) -> str:
    """SIGSTOP to the last rank, for good."""
    setting = replace(setting_of(place.subject), timeout=10)
    with place.job(setting) as job:
        place.middle(job, setting)
        victim = place.subject.victim(place.told(), place.folder)
        assert victim is not None
        struck = time.time()
        os.kill(victim, signal.SIGSTOP)
        done = place.settled(job)
        if place.subject.name == "mnist_ddp":
            job.wait(job.done, LIMIT)
            named = re.search(r"error: ([^\n]*)", job.said())
            at = re.findall(r"steps (\d+) to \d+", job.said())
            resumed = f"resumes by itself at step {at[-1]}, {done - int(at[-1])} of {done} lost; {codes(job)}"
            return f"{quote(named[1] if named else '')} and {resumed}"
        job.wait(job.done, WAIT_NOTICE_AFTER)
        after = [step.time for step in place.told().steps() if step.time > struck]
        gap = max((b - a for a, b in itertools.pairwise([struck, *after])), default=0.0)
        others = [each.poll() is not None for each in job.launchers]
        if all(others):
            return f"job ends, {codes(job)}, {seconds(time.time() - struck)}: {last_words(job)}"
        if len(after) > IN_FLIGHT:
            return f"the others continue without it after {seconds(gap)}"
        return f"hangs: no output and no step in {seconds(WAIT_NOTICE_AFTER)}"


def harmed(place: Place, harm: Callable[[Path], str]) -> str:
    """Corrupt the newest checkpoint's weights after a kill in the middle, then restart."""
    subject, setting = place.subject, setting_of(place.subject)
    if not subject.saves:
        return "saves none"
    done = killed(place, setting)
    path = subject.checkpoint(place.folder)
    if path is None:
        return "no checkpoint found"
    harm(path)
    with place.job(setting, again=True) as job:
        if not job.wait(job.done, LIMIT):
            return f"{last_words(job)}; not ended after {seconds(LIMIT)}"
        told = Told.read(job.told)
        if subject.name == "mnist_ddp":
            at = resumed_at(place, job, setting)
            named = next((line for line in job.said().splitlines() if "checkpoint" in line and "warning" in line), "")
            return f"{quote(named)}; resumes from the one before, step {at}, {done - at} of {done} lost; {codes(job)}"
        if any(each.returncode for each in job.launchers):
            return f"{codes(job)}: {last_words(job)}"
        if not told.events("restored"):
            at = resumed_at(place, job, setting)
            return f"not loaded: starts at step {at}" if at == 0 else f"starts at step {at}"
        before = [step.loss for step in Told.read(place.folder / "told-0").steps()][-20:]
        after = [step.loss for step in told.steps()][:20]
        change = f"loss {statistics.mean(before):.2f} before, {statistics.mean(after):.2f} after"
        return f"loaded without a warning, {change}; {codes(job)}"


def quote(line: str) -> str:
    """Quote a line up to the remedy."""
    words = re.split(r"; | \(kill ", line.removeprefix("warning: "))[0]
    return f'reports "{words}"' if line else "reports nothing"


def flip(path: Path) -> str:
    """One byte in the middle of a file, all its bits."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    return f"byte {len(content) // 2} of {path.name}"


def cut(path: Path) -> str:
    """The second half of a file is gone."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return f"the second half of {path.name}"


def flipped(place: Place) -> str:
    """Corrupt one byte of the newest checkpoint's weights."""
    return harmed(place, flip)


def halved(place: Place) -> str:
    """The second half of its newest checkpoint's weights is gone."""
    return harmed(place, cut)


def other_n(place: Place) -> str:
    """Kill in the middle at 2 ranks, and restart at 3, with the same global batch if the program can set it."""
    subject, setting = place.subject, setting_of(place.subject)
    if not subject.saves:
        return "nothing is saved"
    done = killed(place, setting)
    return restarted(place, replace(setting, n=3), done)


def epoch_at_3(place: Place) -> tuple[str, Told, str]:
    """Run one epoch at 3 ranks, in batches of 500, and return its error, its log and its output."""
    shared = place.shared / f"{place.subject.name}-at-3"
    if shared.exists():
        folder = shared
        wrong, said = (shared / "wrong.txt").read_text(), (shared / "told-0.txt").read_text(errors="replace")
        return wrong, place.subject.told(folder), said
    with place.job(setting_of(place.subject, 3, 1, 500)) as job:
        ended = job.wait(job.done, LIMIT)
        wrong = f"{codes(job)}: {last_words(job)}" if not ended or any(e.returncode for e in job.launchers) else ""
        said = job.said()
    (place.folder / "wrong.txt").write_text(wrong)
    shutil.copytree(place.folder, shared)
    return wrong, place.told(), said


def evaluation(place: Place) -> str:
    """3 ranks, 1 epoch; how many examples its evaluation counts, of 1,000 for most."""
    subject = place.subject
    if not subject.eval_group:
        return "it has no evaluation"
    wrong, told, said = epoch_at_3(place)
    if wrong:
        return wrong
    if subject.name == "mnist_ddp":
        found = re.search(r'"test_examples": (\d+)', said)
        return f"counts {int(found[1]) if found else 0:,} of {subject.tests:,}"
    events = told.events("evaluated")
    last = max((event["epoch"] for event in events), default=0)
    return f"counts {sum(e['count'] for e in events if e['epoch'] == last):,} of {subject.tests:,}"


def odd_batch(place: Place) -> str:
    """Report the sizes of the updates and their share of the data: a global batch of 500, 3 ranks, one epoch."""
    wrong, told, _ = epoch_at_3(place)
    if wrong:
        return wrong
    updates = [sum(len(i) for i in times) for _, times in sorted(told.lineage().items())]
    if place.subject.epochs_told:
        words = sample_words(place, setting_of(place.subject, 3, 1, 500), told)
        return f"updates of {updates[0]}, the last of {updates[-1]}; {words}"
    return f"updates of {updates[0]}"


def same_losses(place: Place) -> str:
    """One epoch at 1 and at 4 ranks, the same global batch where that can be said: how far are the updates' losses."""
    subject, found, samples = place.subject, [], []
    for n in (1, 4):
        setting = setting_of(subject, n, 1)
        inner = Place(subject, place.folder / f"at-{n}", place.shared)
        inner.folder.mkdir()
        subject.prepare(inner.folder, GIVEN)
        with inner.job(setting) as job:
            if not job.wait(job.done, LIMIT) or any(each.returncode for each in job.launchers):
                return f"at {n}: {codes(job)}: {last_words(job)}"
            told = inner.told()
        losses: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for step in told.steps():
            losses.setdefault(step.position, []).append((step.loss, len(step.indices)))
        means = [sum(x * k for x, k in each) / sum(k for _, k in each) for _, each in sorted(losses.items())]
        found.append(means)
        samples.append([sorted(i for indices in times for i in indices) for _, times in sorted(told.lineage().items())])
    one, four = found
    same = sum(a == b for a, b in zip(*samples))
    if len(one) != len(four):
        return f"{len(one)} updates at 1 rank, {len(four)} at 4"
    gaps = [abs(a - b) / abs(a) for a, b in zip(one, four)]
    return f"the first differ by {gaps[0]:.0e}, at most {max(gaps):.0e}; same samples in {same} of {len(one)} updates"


GIVEN: Path | None = None  # --sources

ROWS: dict[str, tuple[str, Callable[[Place], str]]] = {
    "rank-killed": ("A rank is killed (SIGKILL) in the middle", killed_rank),
    "launcher-killed": ("The launcher is killed (SIGKILL)", killed_launcher),
    "term": ("TERM to the launcher, as by a preemption", told_to_stop),
    "stalled": ("A rank is stopped (SIGSTOP)", stalled),
    "flipped": ("A byte of the newest checkpoint is corrupted", flipped),
    "cut": ("Half of the newest checkpoint is missing", halved),
    "other-n": ("Killed at 2 ranks, restarted at 3", other_n),
    "evaluation": ("Evaluation at 3 ranks counts", evaluation),
    "odd-batch": ("A global batch of 500 at 3 ranks", odd_batch),
    "same-losses": ("The losses of 1 and 4 ranks", same_losses),
}
