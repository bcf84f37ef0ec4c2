"""The rows of a check: each injects a fault or asks a question, and returns in words what it saw.

A row that passes returns; the other verdicts are exceptions. Rows share the runs that `Lab` keeps.
"""

from __future__ import annotations

import os
import re
import signal
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep_check.lab import PATIENCE, CannotTell, Failed, Faulted, Lab, NotSeen, Verdict, kill_all, relative
from samestep_check.records import Key, Records, Step, ordered

NOTICE = 4.0  # seconds that ranks may take to notice that their launcher was killed
QUICK = 12  # first rows
ADAPTER = "give an --adapter that records them"


class Row(NamedTuple):
    """A row: its title, the function that decides it, the usual cause of a failure, and the page that mends it."""

    title: str
    decide: Callable[[Lab], str]
    cause: str
    page: str


ROWS: dict[str, Row] = {}


def row(name: str, title: str, cause: str, page: str) -> Callable[[Callable[[Lab], str]], Callable[[Lab], str]]:
    """Add a function to ROWS."""

    def add(decide: Callable[[Lab], str]) -> Callable[[Lab], str]:
        ROWS[name] = Row(title, decide, cause, f"docs/{page}.md")
        return decide

    return add


def restarted(lab: Lab, run: Faulted) -> None:
    """Raise Failed if the script did not restart to its end."""
    if run.again_code is None and run.code == 0:
        raise Failed(f"exit 0 after {run.done} of {len(lab.steps)} steps, so nothing restarts it")
    if run.again_code is None:
        raise Failed("the restart does not end")
    if run.again_code:
        raise Failed(f"the restart fails: exit {run.again_code}: {run.again_words}")
    if lab.steps and not run.again and run.done < len(lab.steps):
        raise Failed("the restart takes no step")


def once_an_epoch(steps: Sequence[Step]) -> Counter[Key]:
    """Return in how many epochs the steps have each sample."""
    return Counter(i for _, i in {(step.epoch, i) for step in steps for i in step.indices or ()})


def resumed_at(lab: Lab, run: Faulted, saved: Sequence[int]) -> int:
    """Return the step at which a restart resumed. Raise Failed if its samples differ from the undisturbed run."""
    restarted(lab, run)
    samples, again = lab.samples(), [step.indices for step in run.again]
    saved = [run.done] if run.in_place else saved
    for at in saved:
        if again == samples[at:]:
            return at
    at = max(0, len(samples) - len(again))
    wanted = once_an_epoch(lab.steps)
    trained = once_an_epoch(lab.steps[: saved[0] if saved else at])
    trained.update(i for step in again for i in step or ())
    repeated, lost = (trained - wanted).total(), (wanted - trained).total()
    ends = [a.epoch != b.epoch for a, b in zip(lab.steps, lab.steps[1:])] + [True]
    filled = all(end or a == b for a, b, end in zip(again, samples[at:], ends[at:]))  # another N fills it otherwise
    if (again == samples[at:] and not saved) or (filled and not (repeated or lost)):
        if at == 0:
            raise Failed(f"starts over at step 0 of {len(samples)}; {run.done} steps lost")
        return at
    where = f"saved at step {saved[0]}, resumes at step {at}" if saved else f"resumes at step {at}"
    where = f"continues without a restart after step {run.done}" if run.in_place else where
    raise Failed(f"{where}: {repeated} samples repeated, {lost} lost")


def saved_at(run: Faulted) -> list[int]:
    """Return the steps of the checkpoints that a restart may resume, the newest first."""
    end = run.again[0].time if run.code == 0 and run.again else run.struck + run.took  # it may restart by itself
    saves = [save for save in run.records.saves() if save.time < end]
    late = [save for save in saves[:-1] if saves[-1].time > run.struck - 0.5]  # the newest may not be whole
    return list(dict.fromkeys(save.step for save in [*saves[-1:], *reversed(late)]))[:2]


def random_by_rank(single: Sequence[Step], several: Sequence[Step]) -> bool:
    """Return whether steps draw random numbers of torch, and others at one rank than at several."""
    one, other = ([(step.random or {}).get("torch") for step in each] for each in (single, several))
    pairs = zip(single, single[1:], one, one[1:])
    draw = any(x != y for a, b, x, y in pairs if a.epoch == b.epoch)
    return draw and any(x != y for x, y in zip(one, other))


@row("rank-killed", "A rank is killed", "no checkpoint, or a restart that does not find it", "recovery")
def rank_killed(lab: Lab) -> str:
    run = lab.killed
    if run.code is None:
        raise Failed(f"the job has not ended {run.took:.0f} s after")
    if run.in_place:
        return "the other ranks continue"
    if run.code == 0 and len(run.attempts) < 2:
        raise Failed(f"exit 0 after {run.done} of {len(lab.steps)} steps")
    restarted(lab, run)
    if run.code == 0:
        return "resumes by itself"
    return f"the job ends after {run.took:.1f} s, exit {run.code}; the restart trains to the end"


@row("term", "TERM to the job", "no handler that saves, or a launcher that does not pass it", "signals")
def term(lab: Lab) -> str:
    return stopped_well(lab, lab.terminated)


def stopped_well(lab: Lab, run: Faulted) -> str:
    """Return how a run ended after TERM. Raise Failed if it lost a step, or ended as if it were done."""
    if run.code is None:
        raise Failed(f"does not end in {run.took:.0f} s")
    if lab.steps and run.done >= len(lab.steps):
        raise Failed(f"ignores TERM and trains to the end; exit {run.code}")
    if run.code == 0:
        raise Failed(f"exit 0 after {run.done} of {len(lab.steps)} steps: a scheduler takes it as done")
    words = f"ends after {run.took:.1f} s, exit {run.code}"
    at = resumed_at(lab, run, saved_at(run))
    if at < run.done:
        raise Failed(f"{words}; {run.done - at} of {run.done} steps lost")
    return f"{words}; no step lost"


@row("resume-position", "Samples after a resume", "the position in the epoch is not saved", "own_loop")
def resume_position(lab: Lab) -> str:
    at = resumed_at(lab, lab.killed, saved_at(lab.killed))
    return f"resumes at step {at} of {len(lab.steps)}, sample for sample"


@row("resume-optimizer", "Learning rate and optimizer after a resume",
     "the optimizer's or the scheduler's state_dict is not saved", "own_loop")  # fmt: skip
def resume_optimizer(lab: Lab) -> str:
    run = lab.killed
    bound = lab.bound()
    restarted(lab, run)
    if not run.again or run.again[0].state is None:
        raise NotSeen("no optimizer of torch")
    at = run.done if run.in_place else len(lab.steps) - len(run.again)
    if not 0 < at < len(lab.steps):
        raise Failed("starts over at step 0: nothing is restored")
    optimizers = {step.optimizer for step in lab.steps}
    compared = set()
    for k, found in enumerate(run.again, at):
        wanted = lab.steps[k]
        name = found.kind if len(optimizers) == 1 else f"{found.kind} (optimizer {found.optimizer})"
        if found.lr != wanted.lr:
            raise Failed(f"learning rate {found.lr[0]:g} of {name} at step {k + 1}, {wanted.lr[0]:g} undisturbed")
        if found.optimizer not in compared:
            compared.add(found.optimizer)
            compare_state(lab, k, found, bound, name)
    first = run.again[0]
    tensors = sum(count for name, (count, _, _) in (first.state or {}).items() if is_of_optimizer(name))
    return f"learning rate {first.lr[0]:g}, {tensors:g} tensors of state, as undisturbed"


def is_of_optimizer(name: str) -> bool:
    """Return whether a name of state is an optimizer's own, and not the weights' or a buffer's."""
    return name != "weights" and not name.startswith("buffer ")


def compare_state(lab: Lab, k: int, found: Step, bound: float, name: str) -> None:
    """Raise Failed if an optimizer's first step after a resume began with another state than undisturbed."""
    wanted = lab.steps[k]
    twin = lab.twin.steps()[k]
    if found.optimizer != wanted.optimizer or found.kind != wanted.kind:
        raise CannotTell(f"{found.kind} takes step {k + 1}, {wanted.kind} undisturbed: the optimizers differ in order")
    place = f"at step {k + 1}" + (f" ({found.line})" if found.line else "")
    lost = [part for part in wanted.state or {} if is_of_optimizer(part)]
    if lost and not any(is_of_optimizer(part) for part in found.state or {}):
        raise Failed(f"{name} starts without its state ({', '.join(lost)}) {place}")
    for part in wanted.state or {}:
        # A norm that the script's own repetition does not reach shows nothing.
        if relative(norm_of(twin, part), norm_of(wanted, part)) <= bound:
            words = f"{part} of {name}" if is_of_optimizer(part) else f"the {part}"
            compare_part(wanted, found, part, bound, f"{words} {place}")
    if found.settings != wanted.settings:
        raise Failed(f"settings of {name} differ {place}: {difference(found.settings, wanted.settings)}")
    if found.scale != wanted.scale:
        raise Failed(f"the GradScaler's scale is {found.scale} {place}, {wanted.scale} undisturbed")
    compare_generators(lab, k, found, place)


def norm_of(step: Step, part: str) -> float:
    """Return the norm of a part of a step's state, 0 without the part."""
    return (step.state or {}).get(part, [0, 0.0, 0])[1]


def compare_part(wanted: Step, found: Step, part: str, bound: float, words: str) -> None:
    """Raise Failed if a part of the state, such as all tensors ``exp_avg``, is another one after a resume."""
    count, norm, zeros = (wanted.state or {})[part]
    others, other_norm, other_zeros = (found.state or {}).get(part, [0, 0.0, 0])
    if part.startswith("buffer ") and others != count:
        return  # other modules have run so far
    if others < count:
        raise Failed(f"{words}: {others:g} tensors, {count:g} undisturbed")
    if relative(norm, other_norm) <= bound:
        return
    if other_zeros > zeros:
        raise Failed(f"{words}: {other_zeros:g} of {others:g} tensors start from zero")
    raise Failed(f"{words} differs by {relative(norm, other_norm):.0e}")


def difference(found: Sequence[Mapping[str, object]] | None, wanted: Sequence[Mapping[str, object]] | None) -> str:
    """Return the first number of parameter groups that differs, with both values."""
    for group, (one, two) in enumerate(zip(found or [], wanted or []), 1):
        for name in two:
            if one.get(name) != two[name]:
                return f"{name} of group {group} is {one.get(name)}, {two[name]} undisturbed"
    return f"{len(found or [])} parameter groups, {len(wanted or [])} undisturbed"


def compare_generators(lab: Lab, k: int, found: Step, place: str) -> None:
    """Raise Failed if steps draw from a generator whose state a resume does not restore."""
    wanted = lab.steps[k]
    twin = lab.twin.steps()[k]
    for name, state in (wanted.random or {}).items():
        is_reproducible = (twin.random or {}).get(name) == state
        differs = (found.random or {}).get(name) not in (None, state)
        if is_reproducible and differs and draws(lab.steps, name):
            raise Failed(f"the generator of {name} has another state {place}, and steps draw from it")


def draws(steps: Sequence[Step], generator: str) -> bool:
    """Return whether each step of an epoch draws from a generator, and not only its loader at the begin."""
    pairs = [(a, b) for a, b in zip(steps, steps[1:]) if a.epoch == b.epoch]
    return bool(pairs) and all((a.random or {}).get(generator) != (b.random or {}).get(generator) for a, b in pairs)


@row("odd-batch", "A batch that N does not divide", "DistributedSampler pads, or DDP averages over ranks", "same_step")
def odd_batch(lab: Lab) -> str:
    samples = lab.samples()
    odd = [k for k, step in enumerate(lab.steps) if len({*step.shards}) > 1]
    epochs: dict[int, Counter[Key]] = {}
    for step, indices in zip(lab.steps, samples):
        epochs.setdefault(step.epoch, Counter()).update(indices)
    repeated = max((count.total() - len(count) for count in epochs.values()), default=0)
    if repeated:
        raise Failed(f"{repeated} samples are repeated in an epoch, to fill the last batch")
    if not odd:
        last = {sum(step.shards) for step in lab.steps}
        raise CannotTell(f"all shards are equal, in batches of {', '.join(map(str, sorted(last)))}: use other sizes")
    bound, single = lab.bound(), lab.single.steps()
    if [step.indices for step in single] != samples:
        raise CannotTell("other samples at 1 rank")
    k, shards = odd[0], " and ".join(map(str, lab.steps[odd[0]].shards))
    pairs = [(each.weights_before, each.weights) for each in (lab.steps[k], single[k])]
    if None in pairs[0]:
        raise NotSeen("the weights")
    (before, after), (alone_before, alone_after) = pairs
    if random_by_rank(single, lab.steps) and relative(after, alone_after) > bound:
        raise CannotTell("steps draw random numbers, and weights at 1 rank differ")
    if relative(before, alone_before) <= bound < relative(after, alone_after):
        raise Failed(f"step {k + 1} has shards of {shards}: its mean is not the mean over samples")
    return f"step {k + 1} has shards of {shards}, and no sample is repeated"


@row("epoch-order", "Order of two epochs", "sampler.set_epoch(epoch) is not called", "concepts")
def epoch_order(lab: Lab) -> str:
    first = next(iter(lab.reference.ranks().values()), None)
    if first is None or any(step.indices is None for step in lab.steps):
        raise NotSeen(f"the examples of steps: {ADAPTER}")
    epochs: dict[int, list[Key]] = {}
    for step, shard in zip(lab.steps, first[0].steps):
        epochs.setdefault(step.epoch, []).extend(shard.indices or ())
    if len(epochs) < 2:
        raise NotSeen("fewer than two epochs")
    one, two, *_ = epochs.values()
    if isinstance(one[0], tuple):  # such as (index, epoch)
        one, two = ([key[0] for key in keys] for keys in (one, two))
    if one == ordered(one):
        raise CannotTell("the examples come in stored order")
    if one == two:
        raise Failed(f"both epochs have the same order: {', '.join(map(str, one[:5]))}...")
    return f"{len(epochs)} epochs in {len(set(map(str, epochs.values())))} orders"


@row("evaluation", "An evaluation that N does not divide", "DistributedSampler pads the evaluation set", "same_step")
def evaluation(lab: Lab) -> str:
    records, n = lab.reference, lab.n
    found = records.evaluations()
    if not found:
        raise NotSeen("no evaluation by a DataLoader, or by an adapter")
    if all(each.size % n == 0 for each in found):
        n = lab.other
        if all(each.size % n == 0 for each in found):
            raise CannotTell(f"{lab.n} and {n} ranks divide {found[-1].size} examples: choose --other-n")
        found = lab.at_other.evaluations()
    for counts, size in found:
        often = max(Counter(counts.values()).items(), key=lambda pair: pair[1])[0]
        more, missing = sum(count - often for count in counts.values() if count > often), size - len(counts)
        if more or missing:
            raise Failed(f"at {n} ranks {more} of {size} examples count twice, {missing} are missing")
    return f"at {n} ranks each of {size} examples counts {'once' if often == 1 else f'{often} times'}"


@row("one-rank", "N = 1 against N", "random numbers by rank, or means over ranks", "same_step")
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
    bound = lab.bound()
    for name in ("weights", "loss"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(single, lab.steps)]
        gaps = [relative(a, b) for a, b in pairs if a is not None and b is not None]
        if gaps and max(gaps) > bound:
            if random_by_rank(single, lab.steps):
                return f"{words}; other {name}, as steps draw random numbers"
            first = next(k for k, gap in enumerate(gaps, 1) if gap > bound)
            raise Failed(f"{words}, but the {name} differ by {gaps[first - 1]:.0e} from step {first} on")
        if gaps:
            return f"{words}, {name} within {max(gaps):.0e}"
    return f"{words}; weights and losses not seen"


@row("exit-codes", "Exit codes", "an error that is caught, or sys.exit(0)", "exit_codes")
def exit_codes(lab: Lab) -> str:
    kill, stop = lab.killed, lab.terminated
    words = f"undisturbed 0, a killed rank {kill.code}, TERM {stop.code}"
    if (kill.code == 0 and len(kill.attempts) < 2 and not kill.in_place) or (
        stop.code == 0 and stop.done < len(lab.steps)
    ):
        raise Failed(f"{words}: 0 although it is not done")
    return words.replace("None", "no end")


@row("leftovers", "Processes left", "ranks that do not notice the launcher's end", "signals")
def leftovers(lab: Lab) -> str:
    for run in (lab.killed, lab.terminated):
        if run.code is None:
            raise Failed(f"the job has not ended {run.took:.0f} s after a fault")
    if lab.left:
        raise Failed(f"{lab.left} processes outlive their launcher by 5 s")
    return "no process outlives its launcher by 5 s"


@row("recovery-time", "Seconds to recover", "no restart to the end", "recovery")
def recovery_time(lab: Lab) -> str:
    restarted(lab, lab.killed)
    if not lab.killed.again:
        raise NotSeen(f"no optimizer step: {ADAPTER}")
    times = [lab.killed.struck, *(step.time for step in lab.killed.again)]
    k = min(2, len(times) - 1) if lab.killed.in_place else 1  # ranks that live may complete the step of the kill
    first = times[k] - times[0]
    words = "without a new start of the job"
    if lab.killed.code != 0:
        words = f"{lab.killed.took:.1f} s of them until the job ended"
    return f"{first:.1f} s from the kill to the next step, {words}"


@row("lost-work", "Steps lost or repeated", "checkpoints are rare, or not found", "recovery")
def lost_work(lab: Lab) -> str:
    words = []
    for name, run in (("killed rank", lab.killed), ("TERM", lab.terminated)):
        restarted(lab, run)
        if not lab.steps:
            raise NotSeen(f"no optimizer step: {ADAPTER}")
        at = len(lab.steps) - len(run.again) if run.again and not run.in_place else run.done
        words.append(f"{name}: {max(0, run.done - at)} of {run.done} steps repeated")
        if at <= 0:
            raise Failed(f"{name}: all {run.done} steps lost")
    return "; ".join(words)


@row("launcher-killed", "The launcher is killed", "ranks do not notice that their parent died", "signals")
def launcher_killed(lab: Lab) -> str:
    with lab.job(lab.copy(), pause=lab.pause(3 * NOTICE)) as job:
        lab.middle(job)
        struck = time.time()
        job.process.kill()
        gone = job.wait(lambda: not job.left(), min(PATIENCE, lab.patience()))
        after = [step for step in job.read().steps() if step.time > struck + NOTICE]
        if not gone:
            raise Failed(f"{len(job.left())} processes left {time.time() - struck:.0f} s after")
        if after:
            raise Failed(f"the ranks train for {after[-1].time - struck:.1f} s without their launcher")
        return f"all ranks end within {time.time() - struck:.1f} s"


@row("stalled", "A rank is stopped (SIGSTOP)", "the timeout of collectives is 30 minutes", "hangs")
def stalled(lab: Lab) -> str:
    with lab.job(lab.copy(), pause=lab.pause()) as job:
        lab.middle(job)
        struck = time.time()
        os.kill(lab.victim(job), signal.SIGSTOP)
        if not job.ended(min(PATIENCE, lab.patience())):
            raise hangs(job.read(), time.time() - struck, lab.options.stall_limit)
        return f"the job ends after {time.time() - struck:.0f} s, exit {job.code}"


def hangs(records: Records, seconds: float, limit: float) -> Verdict:
    """Return the verdict on a job that has not ended after a rank was stopped: its own timeout may be longer."""
    timeouts = [notes.timeout for notes in records.notes() if notes.timeout is not None]
    if not timeouts:
        return CannotTell(f"no end in {seconds:.0f} s, and its timeout is not known: end it within {PATIENCE:g} s")
    longest = max(timeouts)
    if longest > limit:
        return Failed(f"no end in {seconds:.0f} s; its collectives wait {longest:g} s, more than {limit:g} s")
    if longest >= seconds:
        return CannotTell(f"no end in {seconds:.0f} s, as its collectives wait {longest:g} s: shorten the timeout")
    return Failed(f"hangs: no end in {seconds:.0f} s, although its collectives wait {longest:g} s only")


@row("save-killed", "Killed while saving", "the checkpoint is written in place, not renamed", "recovery")
def save_killed(lab: Lab) -> str:
    saves = lab.reference.opens()
    kind = "open" if any(save.kind == "open" for save in saves) else "rename"
    saves = [save for save in saves if save.kind == kind]
    later = [k for k, save in enumerate(saves, 1) if save.step > saves[0].step]
    if not later:
        raise NotSeen(f"{'one checkpoint only' if saves else 'no checkpoint'} is written where Python sees it")
    run = lab.faulted(None, kill_at=kind, kill_save=later[0])
    complete = [save.step for save in run.records.saves() if save.step < saves[later[0] - 1].step]
    # A thread may have written a checkpoint while the next step was taken.
    steps = [step - late for step in complete[::-1] for late in (0, 1)]
    at = resumed_at(lab, run, steps or [0])
    return f"killed at the {kind} of the checkpoint of step {saves[later[0] - 1].step}; resumes at step {at}"


@row("checkpoint-damaged", "The newest checkpoint is damaged", "no checksum is stored", "recovery")
def checkpoint_damaged(lab: Lab) -> str:
    first, names = lab.stopped, list[str]()
    restarted(lab, first)  # without damage

    def harm(work: Path) -> None:
        files: list[Path] = []
        saves = first.records.saves()
        for save in saves:
            path, others = Path(save.path), {each.path for each in saves if each.step != save.step} - {save.path}
            if path.is_file():  # and files beside it that Python does not write, such as safetensors
                beside = [each for each in path.parent.iterdir() if re.search(lab.options.checkpoint, each.name)]
                moment = path.stat().st_mtime
                files = [each for each in beside if abs(each.stat().st_mtime - moment) < 5 and str(each) not in others]
            files = [each for each in path.rglob("*") if each.is_file()] or files
        if not files:
            raise NotSeen("no checkpoint is written where Python sees it")
        names.append(damage(max(files, key=lambda path: path.stat().st_size)))

    run = lab.again(first, lab.n, harm)
    if run.again_code:
        return f"a byte of {names[0]}: refused, exit {run.again_code}: {run.again_words}"
    restarted(lab, run)
    at = len(lab.steps) - len(run.again)
    if at >= len(lab.steps) - len(first.again):
        raise Failed(f"a byte of {names[0]}: loaded without a word, as if it were whole")
    if at <= 0:
        raise Failed(f"a byte of {names[0]}: starts over at step 0")
    return f"a byte of {names[0]}: resumes an older one, at step {at}"


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


@row("other-n", "Resume at another N", "the state is saved by rank", "running")
def other_n(lab: Lab) -> str:
    lab.command(lab.other, again=True)
    at = resumed_at(lab, lab.again(lab.stopped, lab.other), saved_at(lab.stopped))
    return f"at {lab.other} ranks: resumes at step {at}, with the same samples"


@row("two-jobs", "Two jobs at once", "a fixed port", "troubleshooting")
def two_jobs(lab: Lab) -> str:
    pause = lab.pause(2 * lab.took)  # the first trains while the second starts
    with lab.job(lab.copy(), pause=pause) as first:
        first.wait(lambda: first.code is not None or first.progress(lab.options.loss_pattern), lab.patience())
        with lab.job(lab.copy()) as second:
            ended = [job.ended(lab.patience()) for job in (second, first)]
            for name, job, done in zip(("second", "first"), (second, first), ended):
                if not done or job.code:
                    raise Failed(f"the {name} job {f'exit {job.code}' if done else 'hangs'}: {job.last_words()}")
    return "both end with exit 0"


@row("all-killed", "All processes are killed", "checkpoints are rare, or not found", "recovery")
def all_killed(lab: Lab) -> str:
    run = lab.faulted(kill_all)
    at = resumed_at(lab, run, saved_at(run))
    return f"killed after step {run.done}; resumes at step {at}"


@row("replicas", "Equal replicas on all ranks", "a rank skips a step, or loads other weights", "same_step")
def replicas(lab: Lab) -> str:
    restarted(lab, lab.killed)
    runs = ("at the end", lab.reference), ("after a resume", lab.killed.again_records)
    compared = 0
    for when, records in runs:
        for optimizer, digests in (records.last_digests() if records else {}).items():
            if len(digests) < 2 or None in digests.values():
                continue
            compared = len(digests)
            common, _ = Counter(digests.values()).most_common(1)[0]
            others = [str(rank) for rank, digest in digests.items() if digest != common]
            if others:
                name = f"the weights or the state of optimizer {optimizer}"
                raise Failed(f"{when} {name} on rank {', '.join(others)} differ from those of the other ranks")
    if not compared:
        raise NotSeen("no weights that two ranks hold")
    return f"weights and optimizer state are equal on {compared} ranks, at the end and after a resume"


@row("workers", "TERM to the process group", "a loader's workers end first, and the rank fails", "signals")
def workers(lab: Lab) -> str:
    if not any(notes.workers for notes in lab.reference.notes()):
        raise NotSeen("no DataLoader with workers")
    return stopped_well(lab, lab.faulted(lambda job: os.killpg(job.process.pid, signal.SIGTERM)))
