"""Rows that compare a resumed run with the undisturbed run, and comparisons that other rows share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from samestep_check.records import Called, Key, Keys, Step
from samestep_check.runner import Faulted, ScriptRunner, relative
from samestep_check.series import Save, moves, series_of
from samestep_check.verdicts import CannotTell, Failed, NotSeen

JUST_BEFORE = 0.5  # seconds; a checkpoint written this shortly before a fault may be incomplete


def restarted(runner: ScriptRunner, run: Faulted) -> None:
    """Raise Failed if the restarted script did not train to its end."""
    steps = runner.steps
    restart = run.restart
    if restart is None:
        raise Failed(f"exit 0 after {run.done} of {len(steps)} steps, so nothing restarts it")
    if restart.code is None:
        raise Failed("the restart does not end")
    if restart.code:
        raise Failed(f"the restart fails: exit {restart.code}: {restart.error}")
    if steps and not restart.steps and run.done < len(steps):
        raise Failed("the restart takes no step")


def once_an_epoch(steps: Sequence[Step]) -> Counter[Key]:
    """Return, by sample, the number of epochs in which the steps train on the sample."""
    pairs: set[tuple[int, Key]] = set()
    for step in steps:
        pairs.update((step.epoch, key) for key in step.indices or ())
    return Counter(key for _, key in pairs)


def resumed_at(runner: ScriptRunner, run: Faulted, saved: Sequence[int]) -> int:
    """Return the step at which a restart resumed.

    Args:
        runner: the runner of the script, which has the undisturbed run.
        run: the run with a fault, and its restart.
        saved: steps of the checkpoints from which the restart may resume, the newest first.

    Raises:
        Failed: the restart fails, starts over at step 0, or repeats or loses samples.
    """
    restarted(runner, run)
    samples = runner.samples()
    again = [step.indices for step in run.again]
    if run.in_place:
        saved = [run.done]
    for at in saved:
        if again == samples[at:]:
            return at
    at = max(0, len(samples) - len(again))
    if not saved and again == samples[at:]:
        return _not_zero(at, run, len(samples))
    balances = [_balance(runner.steps, runner.steps[:first], again) for first in saved or [at]]
    if (0, 0) in balances and _is_filled(runner.steps, samples, again, at):
        return _not_zero(at, run, len(samples))
    repeated, lost = balances[0]
    raise Failed(f"{_place_of_resume(run, saved, at)}: {repeated} samples repeated, {lost} lost")


def _not_zero(at: int, run: Faulted, total: int) -> int:
    if at == 0:
        raise Failed(f"starts over at step 0 of {total}; {run.done} steps lost")
    return at


def _place_of_resume(run: Faulted, saved: Sequence[int], at: int) -> str:
    if run.in_place:
        return f"continues without a restart after step {run.done}"
    if saved:
        return f"saved at step {saved[0]}, resumes at step {at}"
    return f"resumes at step {at}"


def _balance(steps: Sequence[Step], before: Sequence[Step], again: Sequence[Keys]) -> tuple[int, int]:
    """Return the number of repeated samples and the number of lost samples."""
    wanted = once_an_epoch(steps)
    trained = once_an_epoch(before)
    for keys in again:
        trained.update(keys or ())
    return (trained - wanted).total(), (wanted - trained).total()


def _is_filled(steps: Sequence[Step], samples: Sequence[list[Key]], again: Sequence[Keys], at: int) -> bool:
    """Return whether samples differ only in the last steps of epochs, which another world size may pad."""
    ends = [before.epoch != after.epoch for before, after in zip(steps, steps[1:])]
    ends.append(True)
    pairs = zip(again, samples[at:], ends[at:])
    return all(is_end or keys == wanted for keys, wanted, is_end in pairs)


def saved_at(run: Faulted) -> list[int]:
    """Return the steps of the checkpoints from which a restart may resume, the newest first.

    A script may write several series of checkpoints, such as numbered checkpoints and ``best.pt``. The restart may
    resume from the newest checkpoint of each series, or from the one before if the newest may be incomplete.
    """
    end = run.fault_time + run.duration
    if run.code == 0 and run.again:  # the launcher may have restarted the ranks
        end = run.again[0].time
    saves = [save for save in run.records.saves() if save.time < end]
    found: list[Save] = []
    for series in in_series(saves):
        found += _newest(series, run.fault_time)
    found.sort(key=lambda save: save.time, reverse=True)
    steps = [step for save in found for step in possible_steps(save, saves)]
    return [step for step in dict.fromkeys(steps) if step > 0]


def in_series(saves: Sequence[Save]) -> list[list[Save]]:
    """Return the writes of each series of checkpoints, in order.

    Args:
        saves: the writes of all checkpoints, in order.
    """
    known = moves(saves)
    found: dict[str, list[Save]] = {}
    for save in saves:
        found.setdefault(series_of(save, known), []).append(save)
    return [*found.values()]


def _newest(saves: Sequence[Save], fault_time: float) -> list[Save]:
    """Return the newest checkpoint of a series, and the one before if a fault may have interrupted the newest."""
    found = [saves[-1]]
    is_just_before = saves[-1].time > fault_time - JUST_BEFORE
    is_open = saves[-1].in_background and saves[-1].kind == "open"  # another thread may have written for longer
    if is_just_before or is_open:
        found += reversed(saves[:-1])
    return [*{save.step: save for save in found}.values()][:2]


def possible_steps(save: Save, saves: Sequence[Save]) -> list[int]:
    """Return the steps that a checkpoint may contain, the newest first.

    If another thread or process writes the checkpoint, the training has continued since the checkpoint's step. The
    checkpoint then contains the step of the previous write in its series or a later step.

    Args:
        save: a write of the checkpoint.
        saves: the writes of all checkpoints of the run, in order.
    """
    if not save.in_background:
        return [save.step]
    series = next(series for series in in_series(saves) if save in series)
    previous = max((each.step for each in series if each.step < save.step), default=0)
    earliest = min(save.step, max(previous, 1))
    return [*range(save.step, earliest - 1, -1)]


# --- rows ------------------------------------------------------------------------------------------------------------


def resume_position(runner: ScriptRunner) -> str:
    """Check that a resumed run trains on the samples of the undisturbed run."""
    at = resumed_at(runner, runner.killed, saved_at(runner.killed))
    return f"resumes at step {at} of {len(runner.steps)}, sample for sample"


def other_n(runner: ScriptRunner) -> str:
    """Check that a run resumes at another number of ranks."""
    runner.script.words(runner.other, is_restart=True)
    run = runner.again(runner.stopped, runner.other)
    at = resumed_at(runner, run, saved_at(runner.stopped))
    return f"at {runner.other} ranks: resumes at step {at}, with the same samples"


def resume_optimizer(runner: ScriptRunner) -> str:
    """Check that a resumed run begins with the undisturbed run's optimizer, learning rates and generator states."""
    run: Faulted = runner.killed
    bound = runner.bound()
    restarted(runner, run)
    if not run.again or run.again[0].state is None:
        raise NotSeen("no optimizer of torch")
    total = len(runner.steps)
    if len(runner.twin.steps) != total:
        raise CannotTell(f"differs from itself: {total} steps, then {len(runner.twin.steps)}")
    at = run.done if run.in_place else total - len(run.again)
    if not 0 < at < total:
        raise Failed("starts over at step 0: nothing is restored")
    shifted = _compare_optimizers(runner, run.again, at, bound)
    first = run.again[0]
    state = first.state or {}
    count = sum(state[part][0] for part in optimizer_parts(first))
    words = f"learning rate {first.lr[0]:g}, {count:g} tensors of state, as undisturbed"
    if shifted:
        words += f"; the generator of {', '.join(shifted)} is restored, then drawn from before the first step"
    return words


def _compare_optimizers(runner: ScriptRunner, again: Sequence[Step], at: int, bound: float) -> list[str]:
    """Compare each optimizer's first step, and all learning rates. Return the shifted generators of the first step."""
    steps = runner.steps
    several = len({step.optimizer for step in steps}) > 1
    compared = set()
    shifted, lost = compare_generators(steps, runner.twin.steps, again[0], at)
    has_same_order = is_same_order(steps[at:], again)
    for k, (wanted, twin, found) in enumerate(zip(steps[at:], runner.twin.steps[at:], again), at):
        name = f"{found.kind} (optimizer {found.optimizer})" if several else found.kind
        if found.lr != wanted.lr:
            raise Failed(f"learning rate {found.lr[0]:g} of {name} at step {k + 1}, {wanted.lr[0]:g} undisturbed")
        if found.optimizer not in compared:
            compared.add(found.optimizer)
            comparison = Comparison(k, name, bound, draws_others=bool(shifted or lost), has_same_order=has_same_order)
            compare_state(wanted, twin, found, comparison)
    if not shifted and not lost:
        compare_called(runner, again, at, bound)
    if lost:
        place = place_of(again[0], at)
        raise Failed(f"the generator of {', '.join(lost)} has another state {place}, and steps draw from it")
    return shifted


def is_same_order(wanted: Sequence[Step], found: Sequence[Step]) -> bool:
    """Return whether a resumed run has the optimizers of the undisturbed run, in the same order.

    The numbers may differ: a restart in a later phase of the training may create only the later optimizers.

    Args:
        wanted: the steps of the undisturbed run after the resume.
        found: the steps of the resumed run.
    """
    pairs = {(one.optimizer or 0, other.optimizer or 0) for one, other in zip(wanted, found)}
    ordered = sorted(pairs)
    return all(one < other and two < another for (one, two), (other, another) in pairwise(ordered))


def compare_called(runner: ScriptRunner, again: Sequence[Step], at: int, bound: float) -> None:
    """Raise Failed if a module called without gradients, such as a moving average, differs after a resume.

    Each name is compared once, at its first call. The comparison ends at the first step with other samples, because
    later weights differ, and before the first step with other weights, because a called module may have them.

    Args:
        runner: the runner of the script, which has the undisturbed run.
        again: steps of the resumed run, in order.
        at: number of the first step after the resume, from 0.
        bound: largest relative difference of norms that counts as equal.
    """
    compared: set[str] = set()
    for k, (wanted, twin, found) in enumerate(zip(runner.steps[at:], runner.twin.steps[at:], again), at):
        if relative(wanted.weights_before, found.weights_before) > bound:
            return
        calls = norms_of(wanted.called), norms_of(twin.called), norms_of(found.called)
        _compare_norms(calls, compared, bound, f"before {place_of(found, k).removeprefix('at ')}")
        if found.indices != wanted.indices:
            return
    restart = runner.killed.restart
    if again and restart.records is not None:
        last = [run.records.last_called() for run in (runner.reference, runner.twin, restart)]
        calls = norms_of(last[0]), norms_of(last[1]), norms_of(last[2])
        _compare_norms(calls, compared, bound, "after the last step")


Norms = dict[str, list[float]]  # norms by the name in Called; modules of one class share a name


def norms_of(called: Sequence[Called]) -> Norms:
    """Return the norms of called modules, by name."""
    found: Norms = {}
    for module in called:
        found.setdefault(module.name, []).append(module.norm)
    return found


def _compare_norms(calls: tuple[Norms, Norms, Norms], compared: set[str], bound: float, place: str) -> None:
    """Raise Failed if norms of the resumed run differ; add the compared names to ``compared``.

    ``calls`` has the norms of the undisturbed run, of its repetition and of the resumed run. A name is compared if the
    repetition has the same norms and the resumed run called at least as many modules of this name.
    """
    undisturbed, repeated, resumed = calls
    for name in undisturbed.keys() - compared:
        wanted = undisturbed[name]
        found = resumed.get(name, [])
        is_reproducible = _largest_gap(wanted, repeated.get(name, [])) <= bound
        if len(found) < len(wanted) or not is_reproducible:
            continue
        compared.add(name)
        gap = _largest_gap(wanted, found)
        if gap > bound:
            raise Failed(f"the {name}, which is called without gradients, differ by {gap:.0e} {place}")


def _largest_gap(wanted: Sequence[float], found: Sequence[float]) -> float:
    """Return the largest relative difference between a wanted norm and the nearest found norm."""
    if not found:
        return 1.0
    return max(min(relative(one, other) for other in found) for one in wanted)


def optimizer_parts(step: Step) -> list[str]:
    """Return the names in a step's state that belong to the optimizer, without the names of weights and buffers."""
    return [name for name in step.state or {} if name != "weights" and not is_buffer(name)]


def is_buffer(name: str) -> bool:
    """Return whether a name in a step's state belongs to a buffer."""
    return name.startswith("buffer ")


class Comparison(NamedTuple):
    """The settings of a comparison of an optimizer's state.

    Attributes:
        k: number of the step, from 0.
        name: name of the optimizer.
        bound: largest relative difference of norms that counts as equal.
        draws_others: whether the step draws other random numbers than in the undisturbed run, so that buffers differ.
        has_same_order: the result of `is_same_order`.
    """

    k: int
    name: str
    bound: float
    draws_others: bool
    has_same_order: bool


def place_of(found: Step, k: int) -> str:
    """Return the place of a step in words: its number from 1, and the line of the script."""
    line = f" ({found.line})" if found.line else ""
    return f"at step {k + 1}{line}"


def compare_state(wanted: Step, twin: Step, found: Step, comparison: Comparison) -> None:
    """Raise Failed if an optimizer's first step after a resume began with another state than in the undisturbed run.

    Args:
        wanted: the step of the undisturbed run.
        twin: the step of the undisturbed run's repetition.
        found: the same step of the resumed run.
        comparison: step number, optimizer name and bound of the comparison.

    Raises:
        CannotTell: another optimizer takes this step than in the undisturbed run.
    """
    name = comparison.name
    if not comparison.has_same_order or found.kind != wanted.kind:
        step = comparison.k + 1
        raise CannotTell(f"{found.kind} takes step {step}, {wanted.kind} undisturbed: the optimizers differ in order")
    place = place_of(found, comparison.k)
    lost = optimizer_parts(wanted)
    if lost and not optimizer_parts(found):
        raise Failed(f"{name} starts without its state ({', '.join(lost)}) {place}")
    for part in wanted.state or {}:
        words = f"the {part}"
        if part in lost:
            words = f"{part} of {name}"
        # If the repetition of the undisturbed run has another norm, a difference after the resume proves nothing.
        is_reproducible = relative(norm_of(twin, part), norm_of(wanted, part)) <= comparison.bound
        is_other = comparison.draws_others and is_buffer(part)
        if is_reproducible and not is_other:
            compare_part(wanted, found, part, comparison.bound, words=f"{words} {place}")
    compare_settings(wanted, found, name, place)


def compare_settings(wanted: Step, found: Step, name: str, place: str) -> None:
    """Raise Failed if a setting of a parameter group, or the GradScaler's scale, differs after a resume.

    Args:
        wanted: the step of the undisturbed run.
        found: the same step of the resumed run.
        name: name of the optimizer.
        place: the place of the step, in words.
    """
    if found.settings != wanted.settings:
        raise Failed(f"settings of {name} differ {place}: {difference(found.settings, wanted.settings)}")
    if found.scale != wanted.scale:
        raise Failed(f"the GradScaler's scale is {found.scale} {place}, {wanted.scale} undisturbed")


def norm_of(step: Step, part: str) -> float:
    """Return the norm of a part of a step's state, or 0 if the state lacks the part."""
    return (step.state or {}).get(part, [0, 0.0, 0])[1]


def compare_part(wanted: Step, found: Step, part: str, bound: float, words: str) -> None:
    """Raise Failed if a part of the state, such as all tensors ``exp_avg``, differs after a resume.

    Args:
        wanted: the step of the undisturbed run.
        found: the same step of the resumed run.
        part: name of the part, a key of the step's state.
        bound: largest relative difference of norms that counts as equal.
        words: the part and its place, for the message.
    """
    count, norm, zeros = (wanted.state or {})[part]
    others, other_norm, other_zeros = (found.state or {}).get(part, [0, 0.0, 0])
    if is_buffer(part) and others != count:
        return  # the two runs have called different modules so far
    if others < count:
        raise Failed(f"{words}: {others:g} tensors, {count:g} undisturbed")
    if relative(norm, other_norm) <= bound:
        return
    if other_zeros > zeros:
        raise Failed(f"{words}: {other_zeros:g} of {others:g} tensors start from zero")
    raise Failed(f"{words} differs by {relative(norm, other_norm):.0e}")


def difference(found: Sequence[Mapping[str, object]] | None, wanted: Sequence[Mapping[str, object]] | None) -> str:
    """Return the first setting that differs in a parameter group, with both values, or else the numbers of groups."""
    for group, (one, two) in enumerate(zip(found or [], wanted or []), 1):
        for name in two:
            if one.get(name) != two[name]:
                return f"{name} of group {group} is {one.get(name)}, {two[name]} undisturbed"
    return f"{len(found or [])} parameter groups, {len(wanted or [])} undisturbed"


def compare_generators(
    steps: Sequence[Step],
    twins: Sequence[Step],
    found: Step,
    k: int,
) -> tuple[list[str], list[str]]:
    """Find the random number generators from which steps draw and which differ at the first step after a resume.

    After a resume, a loader may draw once more from a restored generator than in the undisturbed run. So a generator
    counts as restored if one of its states before the resumed step occurred between the undisturbed steps ``k`` - 1
    and ``k``.

    Args:
        steps: the steps of the undisturbed run.
        twins: the steps of the undisturbed run's repetition.
        found: the first step after the resume.
        k: number of this step, from 0.

    Returns:
        Names of shifted generators (restored, but in another state at the step), and names of lost generators.
    """
    shifted = []
    lost = []
    for name, state in (steps[k].random or {}).items():
        is_reproducible = state_of(twins[k], name) == state
        is_equal = state_of(found, name) in (None, state)
        if is_equal or not is_reproducible or not draws(steps, name):
            continue
        known = states_of(steps[k], name)
        if k > 0:
            known.add(state_of(steps[k - 1], name))
        if known.isdisjoint(states_of(found, name)):
            lost.append(name)
        else:
            shifted.append(name)
    return shifted, lost


def state_of(step: Step, generator: str) -> int | None:
    """Return the checksum of a generator's state at a step, or None if the state is not recorded."""
    return (step.random or {}).get(generator)


def states_of(step: Step, generator: str) -> set[int | None]:
    """Return a generator's states at a step, and at loader starts and saves since the previous step."""
    moments = [step.random or {}, *step.random_before]
    return {states[generator] for states in moments if generator in states}


def draws(steps: Sequence[Step], generator: str) -> bool:
    """Return whether all steps draw from a generator, rather than only the loader at the start of an epoch."""
    pairs = [(before, after) for before, after in zip(steps, steps[1:]) if before.epoch == after.epoch]
    changes = [state_of(before, generator) != state_of(after, generator) for before, after in pairs]
    return bool(changes) and all(changes)
