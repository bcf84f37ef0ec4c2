"""The options every app has: same names, same meaning, checked before anything is installed.

Standard library only, because the launch script runs this on the system's Python.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NoReturn

from samestep import UserError

# What a resumed run may change: nothing here alters the arithmetic of a step. Everything else is compared with
# the checkpoint, so an app's own option is protected without being named anywhere.
MAY_CHANGE_AT_RESUME = frozenset(
    "epochs max_steps data_dir run_dir resume checkpoint_every keep_checkpoints log_every device init_from "
    "max_restarts timeout grace straggler quiet requested_dataset evaluate_every evaluate_only keep_best track".split()
)


class Options(argparse.Namespace):
    """Parsed options; beside them, and not among them, what the parser knows of them."""

    REPORTED = ("dataset", "epochs", "global_batch_size", "seed", "dtype")  # what every result repeats
    __slots__ = ("default_dataset", "may_change_at_resume", "must_stay_at_resume", "resolve_dataset")
    default_dataset: str | None  # when neither the user nor a checkpoint names one
    resolve_dataset: Callable[..., Any] | None  # the app's own, in place of `datasets.resolve`
    may_change_at_resume: Sequence[str]  # the app's own options that do not alter a step
    must_stay_at_resume: Sequence[str]  # of those every app has, what this run's steps rest on: a schedule's --epochs


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, raised as :class:`UserError`."""

    default_dataset: str | None = None
    may_change_at_resume: Sequence[str] = ()
    resolve_dataset: Callable[..., Any] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")

    def help_for(self, argv: Sequence[str]) -> str:
        """The help text; where the app has commands and ``argv`` names one, that command's."""
        commands = {name: each for name, each in self.commands().items() if name in argv}
        return next(iter(commands.values()), self).format_help()

    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of the app's commands (``add_subparsers``), by name; empty where it has none."""
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(found[0]) if found else {}

    def parse(self, argv: Sequence[str]) -> Options:
        """The options of a command line. Raises UserError; for an unknown one it names the nearest."""
        options, unknown = self.parse_known_args(argv, Options())
        options.default_dataset, options.may_change_at_resume = self.default_dataset, self.may_change_at_resume
        options.must_stay_at_resume, options.resolve_dataset = (), self.resolve_dataset
        if unknown:
            parsers = [self, *self.commands().values()]
            known = [name for parser in parsers for action in parser._actions for name in action.option_strings]
            known += ["--dry-run"] if self.usage else []  # a launch script, which has one more, gives its usage
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            if near == [unknown[0].split("=")[0]]:  # known to a command, but before its name, or of another one
                hint = "options stand after the command that has them (see COMMAND --help)"
            raise UserError(f"unknown argument {unknown[0]}: {hint}")
        if getattr(options, "evaluate_only", False) and not (options.run_dir or options.init_from):
            raise UserError("--evaluate-only: of what? Name a run by --run-dir, or weights by --init-from")
        if getattr(options, "evaluate_only", False) and not options.resume:
            raise UserError("--evaluate-only takes no step, so --no-resume would clear the run dir for nothing")
        return options


def whole(minimum: int) -> Callable[[str], int]:
    """An option's type: a whole number of at least ``minimum``."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return value

    return convert


def real(minimum: float, below: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """An option's type: a finite number in [minimum, below), or in (minimum, below) with ``above``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (minimum <= value < below) or (above and value == minimum):
            limit = f" and less than {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a finite number {'above' if above else 'of at least'} {minimum:g}{limit}"
            )
        return value

    return convert


def add_common(
    parser: Parser,
    *,
    epochs: int,
    global_batch_size: int,
    lr: str,
    datasets: Sequence[str],
    devices: Sequence[str],
    may_change_at_resume: Sequence[str] = (),
    resolve: Callable[..., Any] | None = None,
) -> None:
    """Add the options that every app has. ``lr`` says in words what the app chooses when none is given.

    ``may_change_at_resume`` names options of the app's own that do not alter a step. ``resolve`` finds data sets of the
    app's own: called as `samestep.datasets.resolve`, it returns and raises what that does.
    """
    default = "(default: %(default)s)"
    training = parser.add_argument_group("training (the same steps on every number of ranks)")
    add = training.add_argument
    add("--epochs", type=whole(0), default=epochs, metavar="E", help=f"passes over the training set {default}")
    add("--max-steps", type=whole(0), metavar="S", help="stop at this step, counted from the start of training")
    add(
        "--global-batch-size",
        type=whole(1),
        default=global_batch_size,
        metavar="B",
        help=f"samples a step, over all ranks together {default}",
    )
    add("--lr", type=real(0.0, above=True), help=f"learning rate (default: {lr})")
    add("--seed", type=whole(0), default=1, help=f"decides initial weights, order of samples, dropout {default}")
    add("--init-from", type=Path, metavar="FILE", help="start from these weights: the model.safetensors of any run")

    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=datasets, help=f"(default: {datasets[0]}, or the checkpoint's)")
    # The launch script resolves the data set before the ranks start, and tells them what the user asked for.
    add("--requested-dataset", help=argparse.SUPPRESS)
    parser.default_dataset, parser.may_change_at_resume = datasets[0], may_change_at_resume
    parser.resolve_dataset = resolve
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help=f"its files are looked at first {default}")

    add = parser.add_argument_group("the run").add_argument
    add("--run-dir", type=Path, metavar="DIR", help="what the run leaves (default: runs/<app>/<UTC time>)")
    goes_on = "go on from the run dir's newest good checkpoint, if it has one (the default)"
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help=goes_on)
    add(
        "--checkpoint-every",
        type=whole(0),
        default=500,
        metavar="S",
        help=f"steps between checkpoints, besides one after each epoch and the last step; 0: only those {default}",
    )
    add("--keep-checkpoints", type=whole(1), default=3, metavar="K", help=f"the newest ones kept {default}")
    between = f"steps between evaluations, besides one after each epoch; 0: only those {default}"
    add("--evaluate-every", type=whole(0), default=0, metavar="S", help=between)
    best = "a checkpoint at each evaluation; that of the best is kept, and becomes model-best.safetensors"
    add("--keep-best", action="store_true", help=best)
    only = "take no step: evaluate the run dir's newest checkpoint, or --init-from, and write evaluation.json"
    add("--evaluate-only", action="store_true", help=only)
    add("--log-every", type=whole(1), default=10, metavar="S", help=f"steps between lines of metrics.jsonl {default}")
    add("--device", choices=devices, default="auto", help="auto: a GPU where each rank has one it can use")
    add("--max-restarts", type=whole(0), default=3, metavar="R", help=f"by the launch script, after failures {default}")
    limit = f"end the job after so many seconds without progress {default}"
    add("--timeout", type=real(0.0, above=True), default=300.0, metavar="T", help=limit)
    limit = f"seconds from a signal to the end of a job that cannot end by itself {default}"
    add("--grace", type=real(0.0, above=True), default=30.0, metavar="T", help=limit)
    limit = f"name a rank that is so many times as slow as the others; more on unlike machines, 0: never {default}"
    add("--straggler", type=real(0.0), default=1.5, metavar="X", help=limit)
    names = "tensorboard,mlflow,wandb, or some of them: what the launch script gives metrics.jsonl to, beside the job"
    add("--track", metavar="NAMES", help=names)
    add("--quiet", action="store_true", help="only warnings, errors and the result on the console")


def arithmetic(options: Options) -> dict[str, Any]:
    """The options that decide a run's numbers, as JSON values: those a resume must repeat."""
    free = MAY_CHANGE_AT_RESUME.union(options.may_change_at_resume).difference(options.must_stay_at_resume)
    return {name: value for name, value in sorted(vars(options).items()) if name not in free}


def as_json(options: argparse.Namespace) -> dict[str, Any]:
    """All options as JSON values."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in sorted(vars(options).items())}
