"""Find the first difference between two runs.

    samestep diff RUN_A RUN_B

The command prints the settings and versions that differ, whether the data are
equal, and the first step whose losses differ. If both runs have --trace-every,
it also prints the first step and tensor that differ. Then it replays both runs
up to the step whose losses differ, from the newest checkpoint before this step.
If exactly one run differs from its replay, an event in that run's process
caused the difference, such as a flipped bit. If both runs equal their replays,
they had different inputs, and the command prints the samples that differ. The
run dirs stay unchanged.

exit codes: 0 equal, 1 different, 2 the command cannot tell or cannot run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep import ConfigError, checkpoint
from samestep.options import Options
from samestep.untrusted import printable, shown

from samestep_observe import diff_page, traces
from samestep_observe.command import new_parser, run_command
from samestep_observe.recorded import Comparison, RecordedRun, compare, differences, distance
from samestep_observe.replay import add_program, announce, check_length, check_program
from samestep_observe.replay_job import Record, make_plan, replayed
from samestep_observe.replay_report import compare_losses, inputs_by_sample, is_comparable
from samestep_observe.run_reader import count_of
from samestep_observe.verify import unlike_tensors

# Options that do not affect the numbers of a step, or whose effect other settings of the header show.
NOT_COMPARED = {
    "data_dir",
    "device",
    "grace",
    "log_every",
    "max_restarts",
    "quiet",
    "requested_dataset",
    "resume",
    "run_dir",
    "start_method",
    "straggler",
    "timeout",
    "trace_every",
    "track",
}
NAMES = ("A", "B")
MOST_NAMED = 5  # maximum number of samples in a message


class OwnReplay(NamedTuple):
    """The replay of a run up to the first step that differs between the runs.

    Attributes:
        comparison: comparison of the replayed losses with the recorded losses.
        is_comparable: whether the replay must repeat the recorded bits.
        records: the records of the replay's ranks about that step.
    """

    comparison: Comparison
    is_comparable: bool
    records: list[Record]


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep diff`` and return its exit code."""
    parser = new_parser("diff", __doc__)
    add = parser.add_argument
    add("one", metavar="RUN_A", type=Path, help="a run dir, which may be read-only")
    add("other", metavar="RUN_B", type=Path, help="another one")
    add("--no-replay", action="store_true", help="compare the files alone")
    add("--html", type=Path, metavar="FILE", help="also draw the losses of both, with the step at which they part")
    add_program(parser)
    return run_command(parser, arguments, _run)


def _run(options: Options) -> int:
    check_program(options.program)
    one = RecordedRun(options.one)
    other = RecordedRun(options.other)
    comparison = compare(one.losses, other.losses)
    first = first_step(one, other)
    lines = []
    for line in describe(options, one, other, comparison):
        print(printable(line), flush=True)
        lines.append(line)
    if options.html:
        diff_page.write(options.html, (one, other), lines=lines, first=first)
    if comparison.count == 0:
        return 2
    is_different = first is not None or lines[-1].startswith("different: ")
    return int(is_different)


def describe(options: Options, one: RecordedRun, other: RecordedRun, comparison: Comparison) -> Iterator[str]:
    """Yield the lines that the command prints. If only checkpoints differ, the last line begins with ``different:``.

    Args:
        options: options of the command.
        one: run A.
        other: run B.
        comparison: comparison of the runs' losses.
    """
    yield from describe_inputs(one, other)
    if comparison.count == 0:
        yield "cannot tell: the runs have no step in common"
        return
    yield from describe_losses(one, other, comparison)
    trace = traces.describe(one.trace, other.trace)
    if trace:
        yield trace
    if comparison.first is not None:
        if not options.no_replay:
            yield from describe_cause(options, comparison.first)
    elif traces.first_difference(one.trace, other.trace) is None:
        yield compare_checkpoints(one, other, comparison)


def first_step(one: RecordedRun, other: RecordedRun) -> int | None:
    """Return the first step at which losses or traces of two runs differ; None if they do not differ."""
    first = compare(one.losses, other.losses).first
    parting = traces.first_difference(one.trace, other.trace)
    steps = [step for step in (first, parting and parting.step) if step is not None]
    return min(steps, default=None)


def describe_inputs(one: RecordedRun, other: RecordedRun) -> Iterator[str]:
    """Yield lines about the settings, the versions and the data of two runs."""
    settings = [*differences(_settings(one), _settings(other))]
    if not settings:
        yield "settings and versions: equal"
    for text in settings:
        yield f"settings: {text}"
    if one.fingerprint is None or other.fingerprint is None:
        yield "data: not recorded by both"
    elif one.fingerprint == other.fingerprint:
        yield f"data: equal (SHA-256 {shown(one.fingerprint[:12])})"
    else:
        yield f"data: different (SHA-256 {shown(one.fingerprint[:12])}, {shown(other.fingerprint[:12])})"


def _settings(run: RecordedRun) -> dict[str, Any]:
    options = {f"--{name}".replace("_", "-"): run.options[name] for name in run.options.keys() - NOT_COMPARED}
    return {"app": run.app, "ranks": run.ranks, **run.settings(), **options}


def describe_losses(one: RecordedRun, other: RecordedRun, comparison: Comparison) -> Iterator[str]:
    """Yield lines about the losses of two runs.

    Args:
        one: run A.
        other: run B.
        comparison: comparison of the runs' recorded losses.
    """
    if one.last_step != other.last_step:
        yield f"steps: A has {one.last_step}, B has {other.last_step}"
    first = comparison.first
    if first is None:
        yield f"losses: {count_of(comparison.count, 'common step')} with equal bits"
        return
    apart = distance(one.losses[first], other.losses[first])
    yield f"losses: different from step {first} on: {one.losses[first]!r}, {other.losses[first]!r} ({apart} apart)"


def compare_checkpoints(one: RecordedRun, other: RecordedRun, comparison: Comparison) -> str:
    """Compare the checkpoints of runs with equal losses, and return the result as a line.

    Args:
        one: run A.
        other: run B.
        comparison: comparison of the runs' losses.
    """
    common = common_checkpoints(one, other)
    for step in common:
        folders = [checkpoint.folder_of(run.folder, step) for run in (one, other)]
        problem = next(unlike_tensors(*folders), "")
        if problem:
            return f"different: {problem}, after equal losses"
    weights = [run.result.get("weights_sha256") for run in (one, other) if run.is_finished]
    if one.last_step == other.last_step and len(weights) == 2 and weights[0] != weights[1]:
        return "different: the SHA-256 of the final weights in result.json, after equal losses"
    return f"identical: the losses of {count_of(comparison.count, 'step')} and {count_of(len(common), 'checkpoint')}"


def common_checkpoints(one: RecordedRun, other: RecordedRun) -> list[int]:
    """Return the steps of the checkpoints that both runs have, oldest first."""
    steps = {each.step for each in other.checkpoints}
    return [each.step for each in one.checkpoints if each.step in steps]


# --- the cause -------------------------------------------------------------------------------------------------------


def describe_cause(options: Options, step: int) -> Iterator[str]:
    """Replay both runs up to ``step``, the first step with different losses, and yield lines about the cause."""
    replays: dict[str, OwnReplay] = {}
    for name, run_dir in zip(NAMES, (options.one, options.other)):
        try:
            replays[name] = replay_own(options, run_dir, step)
        except ConfigError as error:
            yield f"{name} cannot be run again: {error}"
    for name, replay in replays.items():
        if not replay.is_comparable:
            return
        yield describe_own(name, replay, step)
    if len(replays) < len(NAMES):
        return
    yield conclude(replays["A"], replays["B"], step)


def replay_own(options: Options, run_dir: Path, step: int) -> OwnReplay:
    """Replay a run up to ``step``, and compare the replay with the run.

    Args:
        options: options of the command.
        run_dir: folder of the run.
        step: the last step to run again.

    Raises:
        ConfigError: the run cannot be replayed, or the replay is too long.
    """
    run = RecordedRun(run_dir, step)
    plan = make_plan(run, step, last=step)
    check_length(plan, options.yes)
    announce(plan)
    with replayed(plan, options.program) as found:
        return OwnReplay(compare_losses(found), is_comparable(found), found.records.get(step, []))


def describe_own(name: str, replay: OwnReplay, step: int) -> str:
    """Return a line about whether a run equals its own replay.

    Args:
        name: name of the run, A or B.
        replay: the replay of this run.
        step: the last step of the replay.
    """
    if replay.comparison.first is None:
        return f"{name} run again has its own losses up to step {step}"
    return f"{name} departs from its own replay at step {replay.comparison.first}"


def conclude(one: OwnReplay, other: OwnReplay, step: int) -> str:
    """Return a line about the cause of the difference, from the replays of both runs.

    Args:
        one: the replay of run A.
        other: the replay of run B.
        step: the first step whose loss differs between the runs.
    """
    departs = [name for name, each in zip(NAMES, (one, other)) if each.comparison.first is not None]
    if len(departs) == 1:
        rest = "B" if departs[0] == "A" else "A"
        return (
            f"{departs[0]} departs from its own replay, {rest} does not: an event in {departs[0]}'s process, "
            "not in its inputs"
        )
    if departs:
        return "both depart from their own replays: this machine or its libraries round otherwise than theirs"
    return f"the runs were given different inputs: {unlike_inputs(one.records, other.records, step)}"


def unlike_inputs(one: list[Record], other: list[Record], step: int) -> str:
    """Return a text about the difference between the inputs of a step in two replays.

    Args:
        one: records of the ranks of A's replay.
        other: records of the ranks of B's replay.
        step: the step of the records.
    """
    if not one or not other:
        return "the settings above"
    batches = [[], []]  # type: list[list[int]]
    for batch, records in zip(batches, (one, other)):
        for samples in records[0].get("shards", []):
            batch += samples
    if batches[0] != batches[1]:
        return f"step {step} has other samples, or the same in another order"
    before = inputs_by_sample(one)
    after = inputs_by_sample(other)
    samples = [sample for sample in batches[0] if before.get(sample) != after.get(sample)]
    if samples:
        named = ", ".join(map(str, samples[:MOST_NAMED]))
        more = f" and {len(samples) - MOST_NAMED} more" if len(samples) > MOST_NAMED else ""
        return f"the values of sample {named}{more} differ, first used in step {step}"
    return f"step {step} has the same samples with the same values, so the settings above decide it"
