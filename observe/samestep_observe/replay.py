"""Run any step of a recorded run again, and print what it computed.

    samestep replay RUN_DIR --step K [--to K2]

The command starts the run's program in a temporary run dir, from a copy of the
newest checkpoint before step K. For each step from K to K2, the command prints:

  the loss, and whether it has the recorded bits
  the samples of the global batch by rank, with the loss of each sample
  the norms of gradients, updates and weights by layer
  the largest activations

By default, a replay uses the run's number of ranks, or one rank if the run had
--virtual-ranks. Such a replay repeats every bit of the run. To replay a program
of your own that uses samestep.run.Run, pass --program. The command never writes
into RUN_DIR.

exit codes: 0 equal losses, 1 different losses, 2 the command cannot tell or
cannot run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from samestep import ConfigError
from samestep.options import Options, Parser, bounded_int
from samestep.untrusted import printable

from samestep_observe import replay_export
from samestep_observe.command import new_parser, run_command
from samestep_observe.recorded import Comparison, RecordedRun
from samestep_observe.replay_job import Plan, Replayed, make_plan, replayed
from samestep_observe.replay_report import compare_losses, describe_step, describe_verdict, is_comparable
from samestep_observe.run_reader import count_of

MOST_STEPS = 1000  # maximum number of steps to run again without --yes

EQUAL = 0
DIFFERENT = 1
CANNOT_TELL = 2


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep replay`` and return its exit code."""
    parser = new_parser("replay", __doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="a run dir, which may be read-only")
    positive = bounded_int(1)
    add("--step", type=positive, required=True, metavar="K", help="the step, counted from 1, as in metrics.jsonl")
    add("--to", type=positive, metavar="K2", help="the last step to print (default: K)")
    add("--ranks", type=positive, metavar="N", help="number of ranks (default: 1 with --virtual-ranks, else the run's)")
    add("--export", type=Path, metavar="DIR", help="write the batches and gradients of the steps to a new folder")
    add_program(parser)
    return run_command(parser, arguments, _run)


def add_program(parser: Parser) -> None:
    """Add --program and --yes, the options of all commands that replay."""
    add = parser.add_argument
    add("--program", type=Path, metavar="FILE", help="program of a run that is not of an app of this project")
    add("--yes", action="store_true", help=f"run more than {MOST_STEPS} steps again")


def _run(options: Options) -> int:
    run = RecordedRun(options.run_dir, options.step)
    plan = make_plan(
        run,
        options.step,
        last=options.to or options.step,
        ranks=options.ranks,
        export=options.export is not None,
    )
    check_length(plan, options.yes)
    check_program(options.program)
    announce(plan)
    with replay_export.new_folder(options.export), replayed(plan, options.program) as found:
        if options.export:
            replay_export.write(found, options.export)
        comparison = compare_losses(found)
        for line in report(found, comparison):
            print(printable(line))
    return exit_code(found, comparison)


def report(found: Replayed, comparison: Comparison) -> list[str]:
    """Return the lines about the steps that ``found.plan`` records in detail, and the lines of the verdict."""
    lines: list[str] = []
    for step in range(found.plan.first, found.plan.last + 1):
        lines += describe_step(found, step)
    lines += describe_verdict(found, comparison)
    return lines


def exit_code(found: Replayed, comparison: Comparison) -> int:
    """Return the exit code of a replay: EQUAL, DIFFERENT or CANNOT_TELL."""
    if comparison.is_equal:
        return EQUAL
    if comparison.count == 0 or not is_comparable(found):
        return CANNOT_TELL
    return DIFFERENT


def check_length(plan: Plan, is_allowed: bool) -> None:
    """Raise ConfigError if a replay has more than MOST_STEPS steps and ``is_allowed`` (--yes) is False."""
    steps = plan.last - plan.start_step
    if steps > MOST_STEPS and not is_allowed:
        origin = f"the checkpoint of step {plan.start_step}" if plan.start else "the seed"
        raise ConfigError(
            f"step {plan.last} needs {count_of(steps, 'step')} from {origin}, as no checkpoint is nearer: add --yes"
        )


def check_program(program: Path | None) -> None:
    """Raise ConfigError if --program does not name a file."""
    if program is not None and not program.is_file():
        raise ConfigError(f"--program {program}: the file is missing: name the program of the run")


def announce(plan: Plan) -> None:
    """Print the plan of a replay to stderr before the replay starts."""
    print(printable(plan.describe()), file=sys.stderr, flush=True)
