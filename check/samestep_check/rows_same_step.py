"""Rows that check whether the script takes the same steps at any world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from samestep_check.records import Evaluation, Key, Records, Step, ordered
from samestep_check.rows_resume import restarted, state_of
from samestep_check.runner import ScriptRunner, relative
from samestep_check.verdicts import ADAPTER, CannotTell, Failed, NotSeen

SHOWN = 5  # number of examples that a message lists


def odd_batch(runner: ScriptRunner) -> str:
    """Check that a step with unequal shards averages over samples, and that no sample is repeated in an epoch."""
    samples = runner.samples()
    steps = runner.steps
    repeats = _compare_repeats(runner)
    k = _first_odd(steps)
    bound = _bound(runner)
    single = runner.single.steps
    runner.require_common_keys(runner.single.records)
    if [step.indices for step in single] != samples:
        raise CannotTell("other samples at 1 rank")
    words = f"step {k + 1} has shards of {' and '.join(map(str, steps[k].shards))}"
    if _differs(steps[k], single[k], bound):
        if has_random_by_rank(runner):
            raise CannotTell("steps draw random numbers, and weights at 1 rank differ")
        if relative(steps[k].weights_before, single[k].weights_before) > bound:
            raise CannotTell(f"weights at 1 rank differ before step {k + 1}, the first with unequal shards")
        raise Failed(f"{words}: its mean is not the mean over samples")
    return f"{words}, and {repeats}"


def _first_odd(steps: Sequence[Step]) -> int:
    """Return the index of the first step with unequal shards. Raise CannotTell if no step has unequal shards."""
    for k, step in enumerate(steps):
        if len({*step.shards}) > 1:
            return k
    sizes = sorted({sum(step.shards) for step in steps})
    raise CannotTell(f"all shards are equal, in batches of {', '.join(map(str, sizes))}: use other sizes")


def _differs(several: Step, alone: Step, bound: float) -> bool:
    """Return whether a step's weights differ between one rank and several. Raise NotSeen if weights are unknown."""
    if several.weights is None or alone.weights is None:
        raise NotSeen("the weights")
    return relative(several.weights, alone.weights) > bound


def _bound(runner: ScriptRunner) -> float:
    """Return the largest relative difference of norms between world sizes that rounding may cause.

    Each rank rounds its own gradients. So in a low precision, weights differ more than in a repetition of the run.
    """
    eps: list[float] = [notes.eps for notes in runner.reference.records.notes()]
    return max(runner.bound(), *eps)


def _compare_repeats(runner: ScriptRunner) -> str:
    """Return a message on repeated samples. Raise Failed if more samples are repeated in an epoch than at one rank.

    A sampler that draws with replacement repeats samples at one rank too. Two loaders may have equal keys.
    """
    repeated = _repeated(runner.steps)
    if repeated == 0:
        return "no sample is repeated"
    runner.require_common_keys(runner.single.records)
    added = repeated - _repeated(runner.single.steps)
    if added > 0:
        raise Failed(f"{added} samples are repeated in an epoch, to fill the last batch")
    return "no more samples are repeated than at 1 rank"


def _repeated(steps: Sequence[Step]) -> int:
    """Return the largest number of repeated samples in an epoch."""
    epochs: dict[int, list[Key]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).extend(step.indices or ())
    counts = [len(keys) - len(set(keys)) for keys in epochs.values()]
    return max(counts, default=0)


def has_random_by_rank(runner: ScriptRunner) -> bool:
    """Return whether workers draw random numbers, or steps draw some that differ between one rank and several."""
    if any(notes.draws for notes in runner.reference.records.notes()):
        return True
    names = {name for step in runner.steps for name in step.random or {}}
    return any(_draws_by_rank(runner, name) for name in names)


def _draws_by_rank(runner: ScriptRunner, name: str) -> bool:
    """Return whether steps draw from a generator whose states on a rank differ from those at one rank.

    The states of a generator without a seed differ in each run, so such a generator does not count.
    """
    single = runner.single.steps
    alone = [state_of(step, name) for step in single]
    states = [state_of(step, name) for step in runner.steps]
    repeated = [state_of(step, name) for step in runner.twin.steps]
    if states != repeated or not _draw(single, alone):
        return False
    by_step = [{rank.get(name) for rank in step.random_by_rank} for step in runner.steps]
    return any(of_ranks != {state} for of_ranks, state in zip(by_step, alone))


def _draw(steps: Sequence[Step], states: Sequence[int | None]) -> bool:
    """Return whether a generator's state changes between two steps of an epoch, without a loader's start between them.

    A loader, for example of an evaluation, draws a seed for its workers when it starts.
    """
    for before, after, one, two in zip(steps, steps[1:], states, states[1:]):
        if one != two and before.epoch == after.epoch and not after.random_before:
            return True
    return False


def epoch_order(runner: ScriptRunner) -> str:
    """Check that the first two epochs differ in the order of their examples."""
    epochs = _epochs(runner)
    if len(epochs) < 2:
        raise NotSeen("fewer than two epochs")
    one, two = [_examples(keys) for keys in epochs.values()][:2]
    if one == ordered(one):
        raise CannotTell("the examples come in stored order")
    if one == two:
        raise Failed(f"both epochs have the same order: {', '.join(map(str, one[:SHOWN]))}...")
    orders = {str(keys) for keys in epochs.values()}
    return f"{len(epochs)} epochs in {len(orders)} orders"


def _epochs(runner: ScriptRunner) -> dict[int, list[Key]]:
    """Return the first rank's examples by epoch, in the order of its steps."""
    first = next(iter(runner.reference.records.ranks().values()), None)
    steps = runner.steps
    if first is None or any(step.indices is None for step in steps):
        raise NotSeen(f"the examples of steps: {ADAPTER}")
    epochs: dict[int, list[Key]] = {}
    for step, shard in zip(steps, first[0].steps):
        epochs.setdefault(step.epoch, []).extend(shard.indices or ())
    return epochs


def _examples(keys: list[Key]) -> list[Key]:
    """Return the items that identify the examples in keys such as (index, epoch), or else the keys.

    An item identifies the examples if it differs between all keys. No item does so in keys such as (task, index).
    """
    if not all(isinstance(key, tuple) for key in keys):
        return keys
    for items in zip(*keys):
        if len(set(items)) == len(keys):
            return [*items]
    return keys


def evaluation(runner: ScriptRunner) -> str:
    """Check that all examples count equally often if the world size does not divide their number."""
    records: Records = runner.reference.records
    ranks = runner.ranks
    found = records.evaluations()
    if not found:
        raise NotSeen("no evaluation by a DataLoader, or by an adapter")
    if all(each.size % ranks == 0 for each in found):
        ranks = runner.other
        if all(each.size % ranks == 0 for each in found):
            sizes = f"{runner.ranks} and {ranks} ranks divide {found[-1].size} examples"
            raise CannotTell(f"{sizes}: choose --other-n")
        found = runner.at_other.records.evaluations()
        if not found:
            raise CannotTell(f"no evaluation at {ranks} ranks: choose --other-n, or evaluate more often")
    words = [_counted(each, ranks) for each in found]
    return words[-1]


def _counted(each: Evaluation, ranks: int) -> str:
    """Return a message on how often each example counts. Raise Failed if an example counts more often, or never."""
    counts = each.counts
    size = each.size
    if not counts:
        raise Failed(f"at {ranks} ranks none of {size} examples counts")
    times, _ = Counter(counts.values()).most_common(1)[0]
    more = sum(count - times for count in counts.values() if count > times)
    missing = size - len(counts)
    if more or missing:
        raise Failed(f"at {ranks} ranks {more} of {size} examples count twice, {missing} are missing")
    often = "once" if times == 1 else f"{times} times"
    return f"at {ranks} ranks each of {size} examples counts {often}"


def one_rank(runner: ScriptRunner) -> str:
    """Check that N ranks train on the samples of one rank, and reach the same weights, or losses if none are known."""
    _compare_samples(runner)
    steps = runner.steps
    single: list[Step] = runner.single.steps
    words = f"same samples in all {len(steps)} steps"
    bound = _bound(runner)
    weights = _gaps([step.weights for step in single], [step.weights for step in steps])
    losses = _gaps([step.loss for step in single], [step.loss for step in steps])
    for name, gaps in (("weights", weights), ("loss", losses)):
        if not gaps:
            continue
        largest = max(gaps.values())
        if largest <= bound:
            return f"{words}, {name} within {largest:.0e}"
        if has_random_by_rank(runner):
            return f"{words}; other {name}, as steps draw random numbers"
        k = min(k for k, gap in gaps.items() if gap > bound)
        raise Failed(f"{words}, but the {name} differ by {gaps[k]:.0e} from step {k} on")
    return f"{words}; weights and losses not seen"


def _compare_samples(runner: ScriptRunner) -> None:
    """Raise CannotTell or Failed if a step has other samples at one rank."""
    samples = runner.samples()
    runner.require_common_keys(runner.single.records)
    alone = [step.indices or [] for step in runner.single.steps]
    wanted = len(samples[0])
    first = len([*alone, []][0])
    if first != wanted:
        sizes = f"a step has {first} samples at 1 rank, {wanted} at {runner.ranks}"
        raise CannotTell(f"{sizes}: write a rank's batch as {{{wanted}/n}}")
    for k, (one, several) in enumerate(zip(alone, samples), 1):
        if one != several:
            raise Failed(f"step {k} has other samples at 1 rank than at {runner.ranks}")
    if len(alone) != len(samples):
        raise Failed(f"1 rank takes {len(alone)} steps, {runner.ranks} ranks take {len(samples)}")


def _gaps(single: Sequence[float | None], several: Sequence[float | None]) -> dict[int, float]:
    """Return the relative difference of a step's two values, by step from 1, without steps that lack a value."""
    pairs = enumerate(zip(single, several), 1)
    return {k: relative(a, b) for k, (a, b) in pairs if a is not None and b is not None}


def replicas(runner: ScriptRunner) -> str:
    """Check that weights and optimizer state are equal on all ranks."""
    run = runner.killed
    restarted(runner, run)
    compared = _compare_ranks("at the end", runner.reference.records)
    if run.restart.records is not None:
        compared = max(compared, _compare_ranks("after a resume", run.restart.records))
    if not compared:
        raise NotSeen("no weights that two ranks hold")
    return f"weights and optimizer state are equal on {compared} ranks, at the end and after a resume"


def _compare_ranks(when: str, records: Records) -> int:
    """Return how many ranks have equal weights and state. Raise Failed if a rank differs."""
    compared = 0
    for optimizer, digests in records.last_digests().items():
        if len(digests) < 2 or None in digests.values():
            continue
        compared = len(digests)
        common, _ = Counter(digests.values()).most_common(1)[0]
        others = [str(rank) for rank, digest in digests.items() if digest != common]
        if others:
            name = f"the weights or the state of optimizer {optimizer}"
            raise Failed(f"{when} {name} on rank {', '.join(others)} differ from those of the other ranks")
    return compared
