"""Define and parse the options that all apps share.

The launch script runs this module on the system's Python before it installs packages. Therefore this module uses the
standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import math
import numbers
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, NoReturn, TypeVar

from samestep import ConfigError
from samestep.job_info import JobInfo
from samestep.untrusted import shown

TRAINING = "Training"
DATA = "Data"
CHECKPOINT = "Checkpoint and resume"
FAULT_TOLERANCE = "Fault tolerance"
LOGGING = "Logging and tracking"
MODEL = "Model"
GROUPS = (TRAINING, DATA, CHECKPOINT, FAULT_TOLERANCE, LOGGING, MODEL)
HELP_WIDTH = 80  # columns
SHARED_GPU = "cuda:0"  # device of all ranks with --share-gpu
FORK = "fork"
EXEC = "exec"
START_METHODS = (FORK, EXEC)
NOTICE_SOURCES = ("aws", "gcp", "azure", "auto")  # values of --preemption-notice, beside file:PATH
# Directions of metrics for which --keep-best needs no "min:" or "max:".
BEST_DIRECTIONS = {"test_accuracy": "max", "test_loss": "min", "bits_per_byte": "min"}


class Options(argparse.Namespace):
    """The parsed options. The slots hold settings of the parser.

    ``vars(options)`` omits the slots and all options that the app does not offer. Class attributes are the values of
    common options that the app does not offer.

    Attributes:
        RESULT_FIELDS: options that every result contains.
        default_dataset: the dataset to use if neither the user nor a checkpoint specifies a dataset.
        resolve_dataset: the app's function that replaces `samestep.data.datasets.resolve`, or None.
        resume_mutable: names of options that a resume may change, in addition to RESUME_MUTABLE.
        resume_pinned: options of RESUME_MUTABLE that must not change in this run, such as a schedule's epochs.
    """

    RESULT_FIELDS: tuple[str, ...] = ("dataset", "epochs", "global_batch_size", "seed", "dtype")
    __slots__ = ("default_dataset", "resolve_dataset", "resume_mutable", "resume_pinned")

    evaluate_only: bool = False
    first_step_timeout: float | None = None
    global_batch_size: int = 0  # for programs whose batches are measured in tokens
    grace: float = 10.0  # seconds
    init_from: Path | None = None
    log_format: str = "plain"
    max_restarts: int = 0
    preemption_notice: str | None = None
    share_gpu: bool = False
    start_method: str | None = EXEC
    threads: int | None = None
    timeout: float = math.inf  # seconds
    trace_every: int = 0
    track: str | None = None
    virtual_ranks: int | None = None

    def offers(self, name: str) -> bool:
        """Return whether the app has the option ``name``, written with underscores."""
        return name in vars(self)


Parsed = TypeVar("Parsed", bound=Options)


class Parser(argparse.ArgumentParser):
    """A parser of command lines that raises `ConfigError`, with one line, for a mistake."""

    default_dataset: str | None = None
    resolve_dataset: Callable[..., Any] | None = None
    resume_mutable: Sequence[str] = ()

    def __init__(self, description: str | None = None, **settings: Any) -> None:
        """Create a parser, and wrap ``description`` if it is one line."""
        if description and "\n" not in description:
            description = textwrap.fill(description, HELP_WIDTH - 2)
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=HELP_WIDTH)
        super().__init__(description=description, allow_abbrev=False, formatter_class=formatter, **settings)

    def group(self, title: str) -> Any:
        """Return the option group ``title``, such as one of GROUPS. Add the group if it is missing."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, instead of printing the usage and exiting as argparse does."""
        raise ConfigError(f"{message.removeprefix('argument ')} (see --help)")

    def format_help(self) -> str:
        """Return the text of --help. If the program can resume, list the options that a resume may change."""
        text = super().format_help()
        names = [action.option_strings[0] for action in self._actions if self._may_change(action)]
        if "--resume" not in names:
            return text
        sentence = f"A resume may change {', '.join(names)}. It must repeat all other options."
        return f"{text}\n{textwrap.fill(sentence, HELP_WIDTH - 2, break_on_hyphens=False)}\n"

    def _may_change(self, action: argparse.Action) -> bool:
        """Return whether a resume may change an option, and --help shows the option."""
        is_shown_option = action.option_strings and action.help != argparse.SUPPRESS
        return bool(is_shown_option) and (action.dest in RESUME_MUTABLE or action.dest in self.resume_mutable)

    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """Return the parsers of the app's commands (``add_subparsers``), by the command's name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def parse(self, argv: Sequence[str]) -> Options:
        """Return the options of a command line.

        Raises:
            ConfigError: an option is unknown, is invalid, or contradicts another option. For an unknown option, the
                message has the most similar option.
        """
        return self.parse_into(Options(), argv)

    def parse_into(self, options: Parsed, argv: Sequence[str]) -> Parsed:
        """Set the options of a command line as attributes of ``options``, and return ``options``.

        Raises:
            ConfigError: as in `parse`.
        """
        parsed, unknown = self.parse_known_args(argv)
        # ``options`` cannot be argparse's namespace: argparse sets no default if the object already has the attribute.
        for name, value in vars(parsed).items():
            setattr(options, name, value)
        options.default_dataset = self.default_dataset
        options.resolve_dataset = self.resolve_dataset
        options.resume_mutable = self.resume_mutable
        options.resume_pinned = ()
        _check_paths(options)
        as_json(options)  # raises ConfigError for a value that no checkpoint can hold
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]}: {self._hint(unknown[0].split('=')[0])}")
        if options.virtual_ranks:
            options.threads = options.threads or 1  # the rounding of sums depends on the number of threads
        if options.share_gpu:
            if options.device == "cpu":
                raise ConfigError("--share-gpu needs a GPU, and --device cpu takes none: leave one of them out")
            options.device = SHARED_GPU
        if options.evaluate_only:
            _check_evaluate_only(options)
        return options

    def _hint(self, name: str) -> str:
        """Return the remedy for an unknown argument, such as the most similar option."""
        known: list[str] = []
        for parser in (self, *self.commands().values()):
            known += parser._option_string_actions
        if self.usage:  # only the launch script, which has the option --dry-run, sets the usage
            known.append("--dry-run")
        near = difflib.get_close_matches(name, known, n=1)
        if near == [name]:  # the user has put a command's option before the command's name
            return "put it after its command (see COMMAND --help)"
        if near:
            return f"did you mean {near[0]}?"
        return "see --help"


def _check_paths(options: argparse.Namespace) -> None:
    """Raise ConfigError for a path that is not valid UTF-8, because no checkpoint can hold it."""
    for name, value in vars(options).items():
        if isinstance(value, Path) and re.search("[\ud800-\udfff]", str(value)):
            raise ConfigError(f"--{name.replace('_', '-')} {str(value)[:60]!a} is not UTF-8: name a path in UTF-8")


def _check_evaluate_only(options: Options) -> None:
    """Raise ConfigError if --evaluate-only has no source of weights, or if --no-resume would archive the weights."""
    if not (options.run_dir or options.init_from):
        raise ConfigError("--evaluate-only needs weights: name a run by --run-dir, or weights by --init-from")
    if not options.resume:
        raise ConfigError("--evaluate-only --no-resume would clear the run directory: leave one of them out")


def path(text: str) -> Path:
    """Convert an option's value to a path. An empty value, as of an unset variable, would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty: name a path, or leave the option out")
    return Path(text)


def bounded_int(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argparse type for integers in [minimum, maximum]."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if minimum <= int(text) <= maximum:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a whole number from {minimum} to {maximum}")

    return convert


def bounded_float(minimum: float, below: float = 1e38, above: bool = False) -> Callable[[str], float]:
    """Return an argparse type for numbers in [minimum, below), or in (minimum, below) if ``above`` is True.

    Args:
        minimum: smallest value.
        below: upper limit, which a value must not reach. The default is near the limit of float32.
        above: whether to reject ``minimum`` itself.
    """
    least = f"{'above' if above else 'of at least'} {minimum:g}"

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if minimum <= float(text) < below and not (above and float(text) == minimum):
                return float(text)
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a finite number {least} and less than {below:g}")

    return convert


def best_metric(metrics: Sequence[str]) -> Callable[[str], str]:
    """Return the argparse type of --keep-best, which converts [min:|max:]NAME to min:NAME or max:NAME."""

    def convert(text: str) -> str:
        direction, _, name = text.rpartition(":")
        if name not in metrics:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} names no metric: choose one of {', '.join(metrics)}")
        if not direction:
            direction = BEST_DIRECTIONS.get(name, "")
        if direction not in ("min", "max"):
            raise argparse.ArgumentTypeError(f"{text[:60]!r} has no direction: use min:{name} or max:{name}")
        return f"{direction}:{name}"

    return convert


seconds = bounded_float(0.0, below=1e7, above=True)  # argparse type of timeouts, which are below 116 days


# --- options as fields -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """The argparse settings of a field. The function `option` creates objects of this class.

    Attributes:
        help: a noun phrase or an imperative, with the unit. `add_to` appends the default, unless the default is None or
            a bool, or the text contains "(default".
        group: title of the option's group, one of GROUPS.
        may_change: whether a resume may change the option.
        argument: further keywords of `argparse.ArgumentParser.add_argument`.
    """

    help: str
    group: str
    may_change: bool
    argument: Mapping[str, Any]

    def add_to(self, parser: Parser, name: str, default: Any) -> None:
        """Add the option ``--name`` to its group in a parser.

        Args:
            parser: the parser to extend.
            name: name of the field, with underscores.
            default: value if the option is not given.
        """
        argument = {"default": default, "help": self.help, **self.argument}
        if default is False and "nargs" not in argument:
            argument["action"] = argument.get("action", "store_true")
        has_default = "(default" in argument["help"] or argument["help"] == argparse.SUPPRESS
        if not has_default and default is not None and not isinstance(default, bool):
            argument["help"] += " (default: %(default)s)"
        parser.group(self.group).add_argument(f"--{name.replace('_', '-')}", **argument)


def option(default: Any, help: str, *, group: str = TRAINING, may_change: bool = False, **argument: Any) -> Any:
    """Declare a field of `CommonOptions`, or of an app's subclass, as an option.

    Args:
        default: value if the option is not given.
        help: text of --help; see `Option`.
        group: title of the option's group, one of GROUPS.
        may_change: whether a resume may change the value.
        **argument: further keywords of argparse's ``add_argument``.
    """
    return field(default=default, metadata={"option": Option(help, group, may_change=may_change, argument=argument)})


def absent_option(value: Any) -> Any:
    """Declare that the app does not offer a common option. The field has the constant ``value``."""
    return field(default=value, init=False, metadata={"option": None})


def lr_option(default: str, value: float | None = None) -> Any:
    """Declare --lr. In --help, the text ``default``, such as "0.1 with sgd", describes the default ``value``."""
    return option(value, f"learning rate (default: {default})", type=bounded_float(0.0, above=True), metavar="X")


def device_option(*names: str) -> Any:
    """Declare --device, whose value is one of ``names``."""
    return option("auto", "auto: an accelerator if each rank has one", may_change=True, choices=names)


def dataset_option(*names: str) -> Any:
    """Declare --dataset, whose value is one of ``names``. The first name is the default of a new run."""
    help = f"dataset to train on (default: {names[0]}, or the checkpoint's)"
    return option(None, help, group=DATA, choices=names)


def keep_best_option(*metrics: str) -> Any:
    """Declare --keep-best for an evaluation that returns numbers with the names ``metrics``."""
    help = (
        "save a checkpoint at each evaluation, and write the best one's weights to model-best.safetensors; METRIC is "
        "[min:|max:]NAME of a number that the evaluation returns, such as test_loss"
    )
    argument = {"nargs": "?", "const": True, "type": best_metric(metrics), "metavar": "METRIC"}
    return option(False, help, group=CHECKPOINT, may_change=True, **argument)


def start_method_option(default: str | None = None) -> Any:
    """Declare --start-method, the method by which torchrun's agent starts ranks.

    If ``default`` is None, the launcher chooses the method.
    """
    shown_default = default or "fork; exec on a machine with an NVIDIA driver"
    help = (
        f"fork imports the program once and forks the ranks; exec starts a Python per rank (default: {shown_default})"
    )
    return option(default, help, group=FAULT_TOLERANCE, may_change=True, choices=START_METHODS)


def notice_source(text: str) -> str:
    """Return ``text`` if it is a valid value of --preemption-notice. The launch script checks the path of file:PATH.

    Raises:
        argparse.ArgumentTypeError: the value is invalid.
    """
    kind, _, path = text.partition(":")
    is_file = kind == "file" and path != ""
    if text in NOTICE_SOURCES or is_file:
        return text
    raise argparse.ArgumentTypeError(f"{text[:60]!r} is none of {', '.join(NOTICE_SOURCES)} and file:PATH")


def preemption_notice_option() -> Any:
    """Declare --preemption-notice."""
    help = (
        "stop as at TERM when the provider takes this machine back: aws, gcp, azure, auto (the one that the machine's "
        "DMI strings name), or file:PATH, whose appearance is the notice (default: none)"
    )
    return option(None, help, group=FAULT_TOLERANCE, may_change=True, type=notice_source, metavar="SOURCE")


def virtual_ranks_option(default: int | None = None, refusal: str = "") -> Any:
    """Declare --virtual-ranks. If an app cannot support the option, ``refusal`` is the reason for the error message."""

    def convert(text: str) -> int | None:
        if refusal:
            raise argparse.ArgumentTypeError(f"not available, because {refusal}: leave it out")
        return bounded_int(0)(text) or None  # 0 becomes None, as in checkpoints of earlier versions

    help = "sub-shards per global batch, summed in a fixed tree: same bits at any number of ranks (default: off)"
    return option(default, argparse.SUPPRESS if refusal else help, type=convert, metavar="V")


def threads_option() -> Any:
    """Declare --threads, the number of threads per rank."""
    help = "threads per rank (default: OMP_NUM_THREADS, or 1 with --virtual-ranks)"
    return option(None, help, may_change=True, type=bounded_int(1), metavar="T")


def share_gpu_option() -> Any:
    """Declare --share-gpu."""
    help = "let all ranks use the machine's first GPU, for tests and demonstrations; slower than one rank"
    return option(False, help, may_change=True)


def trace_every_option() -> Any:
    """Declare --trace-every."""
    help = "steps between digests of all weights and gradients in log/trace.jsonl (default: 0, none)"
    return option(0, help, group=LOGGING, may_change=True, type=bounded_int(0), metavar="K")


_count = bounded_int(0)
_positive = bounded_int(1)


@dataclass
class CommonOptions(Options):
    """The options that all apps share. An app's subclass adds fields, and may redeclare common options."""

    epochs: int = option(10, "passes over the training set", may_change=True, type=_count, metavar="E")
    max_steps: int | None = option(
        None, "last step since the start of training (default: none)", may_change=True, type=_count, metavar="S"
    )
    global_batch_size: int = option(128, "samples per step, over all ranks", type=_positive, metavar="B")
    lr: float = lr_option("")
    seed: int = option(
        1, "seed of initial weights, sample order and dropout", type=bounded_int(0, 2**63 - 1), metavar="I"
    )
    device: str = device_option("auto")
    evaluate_every: int = option(
        0,
        "steps between evaluations within an epoch; 0 evaluates only after each epoch",
        may_change=True,
        type=_count,
        metavar="S",
    )
    evaluate_only: bool = option(
        False,
        "evaluate the run's newest checkpoint, or --init-from, and write evaluation.json; do not train",
        may_change=True,
    )
    dataset: str = dataset_option("")
    # The launch script resolves the dataset before the ranks start. This option has the name that the user requested.
    requested_dataset: str | None = option(None, argparse.SUPPRESS, group=DATA, may_change=True)
    data_dir: Path = option(
        Path("data"), "folder to search for datasets first", group=DATA, may_change=True, type=path, metavar="DIR"
    )
    run_dir: Path = option(
        None,
        "directory for checkpoints, logs and results (default: runs/<app>/<UTC time>)",
        group=CHECKPOINT,
        may_change=True,
        type=path,
        metavar="DIR",
    )
    resume: bool = option(
        True,
        "resume the run in --run-dir; --no-resume archives it and starts a new one (default: resume)",
        group=CHECKPOINT,
        may_change=True,
        action=argparse.BooleanOptionalAction,
    )
    init_from: Path | None = option(
        None,
        "initial weights: the model.safetensors of any run",
        group=CHECKPOINT,
        may_change=True,
        type=path,
        metavar="FILE",
    )
    checkpoint_every: int = option(
        500,
        "steps between checkpoints within an epoch; 0 saves only after each epoch and the last step",
        group=CHECKPOINT,
        may_change=True,
        type=_count,
        metavar="S",
    )
    keep_checkpoints: int = option(
        3, "newest ones to keep", group=CHECKPOINT, may_change=True, type=_positive, metavar="K"
    )
    keep_best: bool | str = keep_best_option("test_accuracy", "test_loss")
    max_restarts: int = option(
        3,
        "maximum number of restarts after failures",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=_count,
        metavar="R",
    )
    timeout: float = option(
        300.0,
        "seconds without progress after which the job ends as hung",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=seconds,
        metavar="T",
    )
    grace: float = option(
        30.0,
        "seconds from a stop signal until the job is killed",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=seconds,
        metavar="T",
    )
    preemption_notice: str | None = preemption_notice_option()
    straggler: float = option(
        1.5,
        "report a rank X times slower than the others' median; 0 disables",
        group=FAULT_TOLERANCE,
        may_change=True,
        type=bounded_float(0.0),
        metavar="X",
    )
    log_every: int = option(
        10, "steps per line of metrics.jsonl", group=LOGGING, may_change=True, type=_positive, metavar="S"
    )
    track: str | None = option(
        None,
        "trackers to write to, separated by commas: tensorboard, mlflow, wandb (default: none)",
        group=LOGGING,
        may_change=True,
        metavar="NAMES",
    )
    quiet: bool = option(False, "print only warnings, errors and the result", group=LOGGING, may_change=True)


Kind = TypeVar("Kind", bound=CommonOptions)


def options_of(kind: type[CommonOptions]) -> dict[str, Option]:
    """Return the options of a class by field. A subclass that only changes a default keeps its base class's option."""
    found: dict[str, Option | None] = {}
    for base in reversed(kind.__mro__):
        for each in vars(base).get("__dataclass_fields__", {}).values():
            if "option" in each.metadata:
                found[each.name] = each.metadata["option"]
    return {name: declared for name, declared in found.items() if declared is not None}


def make_parser(
    kind: type[CommonOptions], description: str, prog: str | None = None, usage: str | None = None
) -> Parser:
    """Return the parser of an app's options.

    Args:
        kind: the class of the options. Each field that is declared by `option` becomes a command-line option.
        description: description of the app, for --help.
        prog: name of the program, for --help.
        usage: the usage line, for --help.
    """
    parser = Parser(description, prog=prog, usage=usage)
    for title in GROUPS:
        parser.group(title)
    options = options_of(kind)
    for each in fields(kind):
        if each.name in options:  # all other fields are constants of the app
            options[each.name].add_to(parser, each.name, default=each.default)
    _set_defaults_of_launcher(parser)
    parser.default_dataset = options["dataset"].argument["choices"][0]
    parser.resume_mutable = [name for name, each in options.items() if each.may_change]
    return parser


def parse_as(kind: type[Kind], parser: Parser, argv: Sequence[str]) -> Kind:
    """Return the options of a command line as an instance of ``kind``.

    Args:
        kind: class of the options.
        parser: the parser from `make_parser`.
        argv: arguments of the command line.

    Raises:
        ConfigError: as in `Parser.parse`.
    """
    return parser.parse_into(kind(), argv)


def _set_defaults_of_launcher(parser: Parser) -> None:
    """Set the defaults of --run-dir, --timeout and --grace to the values from a launch script."""
    info = JobInfo.from_environ(os.environ)
    parser.set_defaults(
        run_dir=info.run_dir or None,
        timeout="300" if info.timeout is None else str(info.timeout),
        grace="30" if info.grace is None else str(info.grace),
    )


# A resume may change these options. Most of them do not affect the arithmetic of a step; device and threads may affect
# its rounding. Every other option must have the checkpoint's value, except the options in an app's `resume_mutable`.
RESUME_MUTABLE = frozenset(
    [
        "share_gpu",
        "start_method",
        "threads",
        *(name for name, each in options_of(CommonOptions).items() if each.may_change),
    ]
)

# --- options of a program with a parser of its own ---------------------------------------------------------------


def add_common(
    parser: Parser,
    *,
    epochs: int,
    global_batch_size: int,
    lr: str,
    datasets: Sequence[str],
    devices: Sequence[str],
    resume_mutable: Sequence[str] = (),
    resolve: Callable[..., Any] | None = None,
    metrics: Sequence[str] = ("test_accuracy", "test_loss"),
) -> None:
    """Add the options of `CommonOptions` to a parser.

    Args:
        parser: the parser to extend.
        epochs: default of --epochs.
        global_batch_size: default of --global-batch-size, in samples.
        lr: text that describes the default learning rate, such as "0.1 with sgd".
        datasets: names that --dataset accepts; the first is the default.
        devices: names that --device accepts.
        resume_mutable: the app's own options that a resume may change.
        resolve: function that finds the app's own datasets, with the interface of `samestep.data.datasets.resolve`.
        metrics: names of the numbers that the app's evaluation returns, for --keep-best.
    """
    declared = {
        "lr": lr_option(lr),
        "device": device_option(*devices),
        "dataset": dataset_option(*datasets),
        "keep_best": keep_best_option(*metrics),
    }
    defaults = {"epochs": epochs, "global_batch_size": global_batch_size}
    for title in GROUPS:
        parser.group(title)
    for each in fields(CommonOptions):
        own = declared.get(each.name, each)
        own.metadata["option"].add_to(parser, each.name, default=defaults.get(each.name, own.default))
    _set_defaults_of_launcher(parser)
    parser.default_dataset = datasets[0]
    parser.resolve_dataset = resolve
    parser.resume_mutable = resume_mutable


def _add(parser: Parser, name: str, declared: Any) -> None:
    """Add the option ``name`` to a parser.

    Args:
        parser: the parser to extend.
        name: name of the option, with underscores.
        declared: the result of a function such as `threads_option`.
    """
    declared.metadata["option"].add_to(parser, name, default=declared.default)


def add_start_method(parser: Parser, default: str | None = None) -> None:
    """Add --start-method, which `start_method_option` declares."""
    _add(parser, "start_method", start_method_option(default))


def add_preemption_notice(parser: Parser) -> None:
    """Add --preemption-notice."""
    _add(parser, "preemption_notice", preemption_notice_option())


def add_virtual_ranks(parser: Parser, refusal: str = "") -> None:
    """Add --virtual-ranks; without a ``refusal``, also add --threads. See `virtual_ranks_option`."""
    _add(parser, "virtual_ranks", virtual_ranks_option(refusal=refusal))
    if not refusal:
        _add(parser, "threads", threads_option())


def add_share_gpu(parser: Any) -> None:
    """Add --share-gpu to a parser, or to one of its option groups."""
    help = share_gpu_option().metadata["option"].help
    parser.add_argument("--share-gpu", action="store_true", help=help)


def check_virtual_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if --virtual-ranks is set and smaller than the number of ranks."""
    if options.virtual_ranks and options.virtual_ranks < ranks:
        raise ConfigError(f"--virtual-ranks {options.virtual_ranks} is below {ranks} ranks: start fewer")


def resume_invariants(options: Options) -> dict[str, Any]:
    """Return, as JSON values, the options that a resume must repeat, by name."""
    mutable = RESUME_MUTABLE.union(options.resume_mutable).difference(options.resume_pinned)
    return {name: value for name, value in as_json(options).items() if name not in mutable}


def as_json(options: argparse.Namespace) -> dict[str, Any]:
    """Return all options as JSON values, sorted by name.

    Raises:
        ConfigError: `json_value` cannot convert a value.
    """
    values = {}
    for name, value in sorted(vars(options).items()):
        try:
            values[name] = json_value(value)
        except ValueError as error:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} has the value {error}: let its type return a number, a str or a Path"
            ) from None
    return values


def json_value(value: Any) -> Any:
    """Convert any value to a JSON value that is the same in every process.

    Instances of subclasses of numbers, str, list and dict become instances of the built-in types. A set becomes a
    sorted list. Any other value becomes its ``str``.

    Raises:
        ValueError: the ``str`` contains a memory address, which differs between processes.
    """
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(json_value, value), key=repr)
    if isinstance(value, Mapping):
        return {str(json_value(key)): json_value(each) for key, each in value.items()}
    return _json_scalar(value)


def _json_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    text = str(value)
    if re.search(r"\bat 0x[0-9a-fA-F]+", text):
        raise ValueError(f"{shown(text)}, which is another one in each process")
    return text


def own_scalar(value: Any) -> Any:
    """Return a scalar of numpy, or a tensor of one, as Python's own number; return any other value unchanged."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


class _LocalRank(argparse.Action):
    """An action that compares --local-rank with LOCAL_RANK, and does not store the value in the run's options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        expected = os.environ.get("LOCAL_RANK")
        if values != expected:
            raise ConfigError(
                f"--local-rank {values}, but LOCAL_RANK is {expected or 'not set'}: start the ranks with torchrun"
            )


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Add --local-rank, which torch.distributed.launch passes in addition to the variable LOCAL_RANK.

    Before torch 2.0, the option was --local_rank. The parser raises ConfigError if the option and the variable differ.
    """
    hidden = argparse.SUPPRESS
    parser.add_argument("--local-rank", "--local_rank", action=_LocalRank, default=hidden, help=hidden)
