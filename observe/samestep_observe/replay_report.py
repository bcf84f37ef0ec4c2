"""Describe a replayed step: its samples, losses, gradients, updates and activations."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from samestep.untrusted import shown

from samestep_observe.recorded import Comparison, compare, differences, distance, has_same_bits
from samestep_observe.replay_job import Record, Replayed
from samestep_observe.run_reader import count_of

WIDTH = 100  # columns of a list of samples
MOST_LISTED = 1024  # maximum number of samples of a step that are listed
WORST = 5  # number of printed samples with the largest losses
LARGEST = 10  # number of printed modules with the largest activations


class Layer(NamedTuple):
    """The L2 norms, over all ranks, of a parameter before the update, of its gradient and of its update."""

    name: str
    shape: Sequence[int]
    weight: float
    gradient: float
    update: float


def losses_by_sample(records: Iterable[Record]) -> dict[int, float]:
    """Return the loss of each sample of a step, by sample index."""
    found: dict[int, float] = {}
    for record in records:
        found.update(zip(record["samples"], record.get("losses", ())))
    return found


def inputs_by_sample(records: Iterable[Record]) -> dict[int, str]:
    """Return the digest of each sample's inputs, by sample index."""
    found: dict[int, str] = {}
    for record in records:
        found.update(zip(record["samples"], record.get("inputs", ())))
    return found


def layers(records: Sequence[Record]) -> list[Layer]:
    """Return the norms of each parameter, computed from the squared norms in the records of all ranks."""
    names: dict[str, Mapping[str, Any]] = {}
    for record in records:
        names.update(record.get("tensors", {}))
    return [_layer(name, values["shape"], records) for name, values in names.items()]


def _layer(name: str, shape: Sequence[int], records: Sequence[Record]) -> Layer:
    norms = {}
    for kind in ("weight", "gradient", "update"):
        parts = [record["tensors"][name] for record in records if name in record.get("tensors", {})]
        norms[kind] = math.sqrt(sum(part[kind] * part["share"] for part in parts))
    return Layer(name, shape, **norms)


def activations(records: Iterable[Record]) -> dict[str, float]:
    """Return the largest absolute output of each module over all ranks; NaN if a rank has NaN."""
    found: dict[str, float] = {}
    for record in records:
        for name, value in record.get("activations", {}).items():
            before = found.get(name, 0.0)
            found[name] = value if math.isnan(value) else max(before, value)
    return found


# --- lines -----------------------------------------------------------------------------------------------------------


def describe_step(replayed: Replayed, step: int) -> Iterator[str]:
    """Yield the lines about one step."""
    records = replayed.records.get(step, [])
    recorded = replayed.plan.run.losses.get(step)
    yield f"step {step}"
    yield f"  {describe_loss(replayed.losses.get(step), recorded)}"
    if not records:
        yield "  the probes saw nothing of this step: its program has no samestep.run.Run"
        return
    yield from _describe_update(records)
    yield from _describe_samples(records)
    yield from _describe_layers(layers(records))
    yield from _describe_activations(activations(records))
    for record in records[:1]:
        for hook, error in record.get("unseen", {}).items():
            yield f"  not seen: {shown(hook)}: {shown(error, limit=200)}"


def describe_loss(replayed: float | None, recorded: float | None) -> str:
    """Return a line that compares a replayed loss with the recorded loss."""
    if replayed is None:
        return "loss: the replay did not log it"
    if recorded is None:
        return f"loss {replayed!r}, and none is recorded"
    if has_same_bits(replayed, recorded):
        return f"loss {replayed!r}: the recorded bits"
    return f"loss {replayed!r}, recorded {recorded!r}: relative distance {distance(replayed, recorded)}"


def _describe_update(records: Sequence[Record]) -> Iterator[str]:
    rates = sorted({*records[0].get("learning_rates", ())})
    norm = math.sqrt(sum(layer.gradient**2 for layer in layers(records)))
    text = f"  learning rate {', '.join(f'{rate:g}' for rate in rates) or 'not seen'}, gradient norm {norm:.6g}"
    clip = records[0].get("clip")
    if clip:
        before, limit = clip
        verb = "clipped from" if before > limit else "not clipped, before"
        text += f", {verb} {before:.6g} (limit {limit:g})"
    yield text


def _describe_samples(records: Sequence[Record]) -> Iterator[str]:
    losses = losses_by_sample(records)
    shards = records[0].get("shards", [])
    yield f"  {count_of(sum(map(len, shards)), 'sample')}, by the ranks of the recorded run:"
    worst = sorted(losses, key=lambda sample: -_order(losses[sample]))[:WORST]
    if worst:
        yield f"    largest losses: {', '.join(f'sample {each}: {losses[each]:.4f}' for each in worst)}"
    is_listed = sum(map(len, shards)) <= MOST_LISTED
    for rank, samples in enumerate(shards):
        yield f"    rank {rank}: {count_of(len(samples), 'sample')}{', with their losses:' if is_listed else ''}"
        if is_listed:
            words = " ".join(_sample_text(each, losses) for each in samples)
            yield from textwrap.wrap(words, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _sample_text(sample: int, losses: Mapping[int, float]) -> str:
    if sample not in losses:
        return str(sample)
    return f"{sample}:{losses[sample]:.3f}"


def _order(value: float) -> float:
    """Return ``value``, or infinity for NaN, so that a sort places NaN after all finite values."""
    return math.inf if math.isnan(value) else value


def _describe_layers(found: Sequence[Layer]) -> Iterator[str]:
    if not found:
        return
    width = max(len(layer.name) for layer in found)
    yield f"  {'layer':{width}}  {'gradient':>11}  {'update':>11}  {'weight':>11}  shape"
    for layer in found:
        numbers = f"{layer.gradient:11.5g}  {layer.update:11.5g}  {layer.weight:11.5g}"
        yield f"  {shown(layer.name):{width}}  {numbers}  {list(layer.shape)}"


def _describe_activations(found: Mapping[str, float]) -> Iterator[str]:
    largest = sorted(found, key=lambda name: -_order(found[name]))[:LARGEST]
    if largest:
        yield f"  largest activations: {', '.join(f'{shown(name)} {found[name]:.4g}' for name in largest)}"


# --- the verdict -----------------------------------------------------------------------------------------------------


def describe_verdict(replayed: Replayed, comparison: Comparison) -> Iterator[str]:
    """Yield lines about whether the replay repeats the recorded run, and about causes of a difference."""
    plan = replayed.plan
    for text in differences(plan.run.settings(), {**plan.run.settings(), **_settings(replayed)}):
        yield f"warning: when recorded and now, {text}: the bits may differ by it"
    if comparison.count == 0:
        yield "cannot tell: the run recorded none of these losses"
        return
    steps = f"steps {plan.start_step + 1} to {plan.last}"
    if comparison.is_equal:
        yield f"equal: {comparison.equal} of {comparison.count} losses of {steps} have the recorded bits"
        return
    first = comparison.first
    last = max(plan.run.losses.keys() & replayed.losses.keys())  # log/losses.bin may lack the last steps
    apart = distance(plan.run.losses[last], replayed.losses[last])
    if not is_comparable(replayed):
        yield f"cannot tell: {plan.ranks} ranks round otherwise than {plan.run.ranks}, and the distance grows:"
        yield f"  {apart} at step {last}, after {count_of(last - plan.start_step, 'step')}"
        return
    yield (
        f"different: {comparison.equal} of {comparison.count} losses of {steps} have the recorded bits; "
        f"the first other one is step {first}'s"
    )


def is_comparable(replayed: Replayed) -> bool:
    """Return whether the replay must repeat the recorded bits.

    The bits must be equal if the replay has the run's number of ranks, or if the run has virtual ranks.
    """
    run = replayed.plan.run
    return bool(run.virtual_ranks) or replayed.plan.ranks == run.ranks


def _settings(replayed: Replayed) -> dict[str, Any]:
    """Return the replay's versions and settings, limited to names that the recorded run's header also has."""
    names = replayed.plan.run.settings().keys() - {"OMP_NUM_THREADS"}
    if not is_comparable(replayed):
        names -= {"backend"}
    return {name: value for name, value in replayed.header.items() if name in names}


def compare_losses(replayed: Replayed) -> Comparison:
    """Compare the losses of a replay with the recorded losses."""
    return compare(replayed.losses, replayed.plan.run.losses)
