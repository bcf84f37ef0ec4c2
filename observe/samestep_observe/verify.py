"""Check the files of a run against each other, and run some of its steps again.

    samestep verify RUN_DIR [--steps S]

The command checks the checkpoints against their digests, and the result against
the weights. It checks that metrics.jsonl and log/losses.bin miss no step and
repeat no step, and have equal losses. Then it chooses S stretches at random,
each between two checkpoints, and runs their steps again. It compares every
loss, and the tensors of the checkpoint at the end of each stretch. RUN_DIR
stays unchanged.

exit codes: 0 all checks pass, 1 a check fails, 2 the command cannot tell or
cannot run
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep import ConfigError, checkpoint, trace
from samestep.checkpoint import CorruptCheckpoint
from samestep.options import Options, bounded_int
from samestep.untrusted import printable, shown

from samestep_observe import traces, verify_files
from samestep_observe.command import new_parser, run_command
from samestep_observe.recorded import RecordedRun
from samestep_observe.replay import MOST_STEPS, add_program, announce, check_program
from samestep_observe.replay_job import Replayed, make_plan, replayed
from samestep_observe.replay_report import compare_losses
from samestep_observe.run_reader import count_of
from samestep_observe.verify_files import Finding


class Stretch(NamedTuple):
    """The steps ``start`` + 1 to ``end``. ``start`` is 0 or a checkpoint's step; ``end`` may also be the last step."""

    start: int
    end: int


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep verify`` and return its exit code."""
    parser = new_parser("verify", __doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="a run dir, which may be read-only")
    help = "number of stretches to run again; 0 checks the files alone (default: 3)"
    add("--steps", type=bounded_int(0), default=3, metavar="S", help=help)
    add_program(parser)
    return run_command(parser, arguments, _run)


def _run(options: Options) -> int:
    run = RecordedRun(options.run_dir)
    check_program(options.program)
    problems = 0
    for finding in verify_files.check(run):
        print(printable(describe(finding)), flush=True)
        problems += bool(finding.problem)
    if problems:
        print(f"different: {count_of(problems, 'problem')} in the files of {run.folder}")
        return 1
    chosen = choose(stretches(run, options.yes), options.steps)
    for stretch in chosen:
        finding = verify_stretch(options.run_dir, stretch, program=options.program)
        print(printable(describe(finding)), flush=True)
        problems += bool(finding.problem)
    if problems:
        print(f"different: {problems} of {len(chosen)} stretches of {run.folder} differ when run again")
        return 1
    if options.steps and not chosen:
        print(f"cannot tell: no stretch of {run.folder} has at most {MOST_STEPS} steps: add --yes")
        return 2
    print(f"{run.folder} is what it claims")
    return 0


def describe(finding: Finding) -> str:
    """Return a finding as a line."""
    if finding.problem:
        return f"wrong  {finding.file}: {finding.problem}"
    return f"right  {finding.file}: {finding.claim}"


def stretches(run: RecordedRun, is_long_allowed: bool = False) -> list[Stretch]:
    """Return the stretches between step 0, the checkpoints and the last step.

    Args:
        run: the recorded run.
        is_long_allowed: whether to return stretches of more than MOST_STEPS steps.
    """
    found = []
    start = 0
    for end in [*(each.step for each in run.checkpoints), run.last_step]:
        if end > start and (is_long_allowed or end - start <= MOST_STEPS):
            found.append(Stretch(start, end))
        start = end
    return found


def choose(found: Sequence[Stretch], count: int) -> list[Stretch]:
    """Choose at most ``count`` stretches at random; return them in ascending order."""
    return sorted(random.sample(found, min(count, len(found))))


def verify_stretch(run_dir: Path, stretch: Stretch, program: Path | None) -> Finding:
    """Run a stretch again, and compare the replay with the recorded run.

    Args:
        run_dir: folder of the run.
        stretch: the steps to run again.
        program: value of --program; None without the option.

    Returns:
        A finding whose problem is the first difference; "" if the replay repeats the run.

    Raises:
        ConfigError: the stretch cannot be run again.
    """
    run = RecordedRun(run_dir, stretch.end)
    plan = make_plan(run, stretch.end, last=stretch.end, start=stretch.start)
    announce(plan)
    name = f"steps {stretch.start + 1} to {stretch.end}"
    with replayed(plan, program) as found:
        problem = next(unlike(found), "")
        comparison = compare_losses(found)
    tensors = ", and the tensors of the checkpoint" if checkpoint.folder_of(run_dir, stretch.end).is_dir() else ""
    return Finding(name, f"run again: {comparison.equal} losses{tensors} have the recorded bits", problem)


def unlike(found: Replayed) -> Iterator[str]:
    """Yield a text for each difference between a replay and the recorded run, in losses, traces or final tensors."""
    run = found.plan.run
    comparison = compare_losses(found)
    if comparison.first is not None:
        step = comparison.first
        yield f"the loss of step {step} is {found.losses[step]!r} when run again, and {run.losses[step]!r} recorded"
    if comparison.count < found.plan.last - found.plan.start_step:
        yield f"{found.plan.last - found.plan.start_step - comparison.count} of its losses are not recorded"
    parting = traces.first_difference(run.trace, trace.read(found.folder))
    if parting is not None:
        yield f"{parting.describe()}, when run again"
    recorded = checkpoint.folder_of(run.folder, found.plan.last)
    if recorded.is_dir():
        yield from unlike_tensors(checkpoint.folder_of(found.folder, found.plan.last), recorded)


def unlike_tensors(one: Path, other: Path) -> Iterator[str]:
    """Yield a text for each tensor in which two checkpoints differ.

    Raises:
        ConfigError: one of the checkpoints is corrupt.
    """
    try:
        now = digests(one)
        before = digests(other)
    except CorruptCheckpoint as error:
        raise ConfigError(f"{other} cannot be compared: {shown(error, limit=200)}") from error
    for name in sorted({*now, *before}):
        if now.get(name) != before.get(name):
            yield f"{other.name}: {shown(name)} differs"


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint, by "<group>: <name>".

    Raises:
        CorruptCheckpoint: a file of the checkpoint is missing or damaged.
    """
    saved = checkpoint.read(folder)
    found = {}
    for group, content in saved.contents.items():
        for name, digest in checkpoint.tensor_digests(content).items():
            found[f"{group}: {name}"] = digest
    return found
