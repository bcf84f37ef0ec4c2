"""Define and parse the options that every app shares, before anything is installed.

The launch script runs this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import numbers
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NoReturn

from samestep import ConfigError
from samestep.untrusted import shown

GROUPS = "Training", "Data", "Checkpoint and resume", "Fault tolerance", "Logging and tracking", "Model"
HELP_WIDTH = 80  # columns
SHARED_GPU = "cuda:0"  # the device of every rank with --share-gpu
FORK = "fork"
EXEC = "exec"
START_METHODS = (FORK, EXEC)
# The metrics for which --keep-best needs no direction. Alone, --keep-best takes the first that an evaluation has.
BEST_DIRECTIONS = {"test_accuracy": "max", "test_loss": "min", "bits_per_byte": "min"}
# Options that may change at a resume, because they do not change the arithmetic of a step. Every other option is
# compared with the checkpoint, so an app's own options are protected without being listed anywhere.
RESUME_MUTABLE = frozenset(
    "epochs max_steps data_dir run_dir resume checkpoint_every keep_checkpoints log_every device share_gpu "
    "init_from threads max_restarts start_method timeout grace straggler quiet requested_dataset evaluate_every "
    "evaluate_only keep_best track".split()
)


class Options(argparse.Namespace):
    """Hold the parsed options, and settings of the parser as slots.

    ``vars(options)`` omits the slots, and options that the app does not offer. Those have a neutral value here.

    Attributes:
        RESULT_FIELDS: options that every result repeats.
        default_dataset: the dataset to use if neither the user nor a checkpoint names one.
        resolve_dataset: the app's own function in place of `samestep.data.datasets.resolve`, or None.
        resume_mutable: the app's own options that may change at a resume.
        resume_pinned: options of RESUME_MUTABLE that must not change in this run, such as a schedule's epochs.
    """

    RESULT_FIELDS: tuple[str, ...] = ("dataset", "epochs", "global_batch_size", "seed", "dtype")
    __slots__ = ("default_dataset", "resolve_dataset", "resume_mutable", "resume_pinned")

    evaluate_only: bool = False
    first_step_timeout: float | None = None
    global_batch_size: int = 0  # of programs whose batches have a number of tokens
    log_format: str = "plain"
    share_gpu: bool = False
    threads: int | None = None
    virtual_ranks: int | None = None


class Parser(argparse.ArgumentParser):
    """Parse command lines, and raise `ConfigError` with one line for a mistake."""

    options_class: type[Options] = Options  # an app whose result repeats other options has its own
    default_dataset: str | None = None
    resolve_dataset: Callable[..., Any] | None = None
    resume_mutable: Sequence[str] = ()

    def __init__(self, description: str | None = None, **settings: Any) -> None:
        """Wrap a description that is one line."""
        if description and "\n" not in description:
            description = textwrap.fill(description, HELP_WIDTH - 2)
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=HELP_WIDTH)
        super().__init__(description=description, allow_abbrev=False, formatter_class=formatter, **settings)

    def group(self, title: str) -> Any:
        """Return the option group ``title``, such as one of GROUPS; add it if the parser lacks it."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message.removeprefix('argument ')} (see --help)")

    def format_help(self) -> str:
        """Return the text of --help. If the program can resume, it ends with the options that a resume may change."""
        text = super().format_help()
        names = [action.option_strings[0] for action in self._actions if self._may_change(action)]
        if "--resume" not in names:
            return text
        sentence = f"A resume may change {', '.join(names)}. It must repeat all other options."
        return f"{text}\n{textwrap.fill(sentence, HELP_WIDTH - 2, break_on_hyphens=False)}\n"

    def _may_change(self, action: argparse.Action) -> bool:
        """Return whether --help shows an option, and a resume may change it."""
        is_shown = action.help != argparse.SUPPRESS
        return is_shown and (action.dest in RESUME_MUTABLE or action.dest in self.resume_mutable)

    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """Return the parsers of the app's commands (``add_subparsers``) by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def parse(self, argv: Sequence[str]) -> Options:
        """Return the options of a command line.

        Raises:
            ConfigError: an option is unknown (the message names the nearest one), invalid or contradicts another.
        """
        parsed, unknown = self.parse_known_args(argv)  # argparse gives an Options with neutral values no defaults
        options = self.options_class(**vars(parsed))
        options.default_dataset = self.default_dataset
        options.resolve_dataset = self.resolve_dataset
        options.resume_mutable = self.resume_mutable
        options.resume_pinned = ()
        _check_paths(options)
        as_json(options)  # a value that no checkpoint can hold is refused here
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]}: {self._hint(unknown[0].split('=')[0])}")
        if options.virtual_ranks:
            options.threads = options.threads or 1  # a kernel's threads decide how its sums round
        if options.share_gpu:
            if options.device == "cpu":
                raise ConfigError("--share-gpu needs a GPU, and --device cpu takes none: leave one of them out")
            options.device = SHARED_GPU
        if options.evaluate_only:
            _check_evaluate_only(options)
        return options

    def _hint(self, name: str) -> str:
        """Return the remedy for an unknown argument, by the nearest option."""
        known: list[str] = []
        for parser in (self, *self.commands().values()):
            known += parser._option_string_actions
        if self.usage:  # set by the launch script, which has this option too
            known.append("--dry-run")
        near = difflib.get_close_matches(name, known, n=1)
        if near == [name]:  # an option of a command, before the command's name
            return "put it after its command (see COMMAND --help)"
        if near:
            return f"did you mean {near[0]}?"
        return "see --help"


def _check_paths(options: argparse.Namespace) -> None:
    """Raise ConfigError for a path that is not UTF-8, which no checkpoint can hold."""
    for name, value in vars(options).items():
        if isinstance(value, Path) and re.search("[\ud800-\udfff]", str(value)):
            raise ConfigError(f"--{name.replace('_', '-')} {str(value)[:60]!a} is not UTF-8: name a path in UTF-8")


def _check_evaluate_only(options: Options) -> None:
    """Raise ConfigError if --evaluate-only has no weights, or would delete them."""
    if not (options.run_dir or options.init_from):
        raise ConfigError("--evaluate-only needs weights: name a run by --run-dir, or weights by --init-from")
    if not options.resume:
        raise ConfigError("--evaluate-only --no-resume would clear the run directory: leave one of them out")


def bounded_int(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argparse type for integers in [minimum, maximum]."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if minimum <= int(text) <= maximum:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a whole number from {minimum} to {maximum}")

    return convert


def bounded_float(minimum: float, below: float = 1e38, above: bool = False) -> Callable[[str], float]:
    """Return an argparse type for numbers in [minimum, below), or in (minimum, below) if ``above``.

    Larger numbers than the default limit do not fit into float32.

    Args:
        minimum: least value.
        below: limit that a value must not reach.
        above: whether ``minimum`` itself is refused.
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


seconds = bounded_float(0.0, below=1e7, above=True)  # argparse type of timeouts; larger values overflow clocks


def add_common(
    parser: Parser,
    *,
    epochs: int,
    global_batch_size: int | None,
    lr: str,
    datasets: Sequence[str],
    devices: Sequence[str],
    resume_mutable: Sequence[str] = (),
    resolve: Callable[..., Any] | None = None,
    metrics: Sequence[str] = ("test_accuracy", "test_loss"),
) -> None:
    """Add the options that every app has.

    Args:
        parser: the parser to extend.
        epochs: default of --epochs.
        global_batch_size: default of --global-batch-size, in samples; None for an app that has another option for it.
        lr: text that describes the default learning rate, such as "0.1 with sgd".
        datasets: names that --dataset accepts; the first is the default.
        devices: names that --device accepts.
        resume_mutable: the app's own options that may change at a resume.
        resolve: finds the app's own datasets, with the interface of `samestep.data.datasets.resolve`.
        metrics: names of numbers that the app's evaluation returns, for --keep-best.
    """
    parser.default_dataset = datasets[0]
    parser.resolve_dataset = resolve
    parser.resume_mutable = resume_mutable
    default = "(default: %(default)s)"
    count = bounded_int(0)
    positive = bounded_int(1)
    training, data, checkpoint, recovery, log, _ = (parser.group(title).add_argument for title in GROUPS)

    training("--epochs", type=count, default=epochs, metavar="E", help=f"passes over the training set {default}")
    training("--max-steps", type=count, metavar="S", help="last step since the start of training (default: none)")
    size = f"samples per step, over all ranks {default}"
    if global_batch_size is not None:
        training("--global-batch-size", type=positive, default=global_batch_size, metavar="B", help=size)
    training("--lr", type=bounded_float(0.0, above=True), metavar="X", help=f"learning rate (default: {lr})")
    seed = f"seed of initial weights, sample order and dropout {default}"
    training("--seed", type=bounded_int(0, 2**63 - 1), default=1, metavar="I", help=seed)
    training("--device", choices=devices, default="auto", help=f"auto: an accelerator if each rank has one {default}")
    every = f"steps between evaluations within an epoch; 0 evaluates only after each epoch {default}"
    training("--evaluate-every", type=count, default=0, metavar="S", help=every)
    only = "evaluate the run's newest checkpoint, or --init-from, and write evaluation.json; do not train"
    training("--evaluate-only", action="store_true", help=only)

    data("--dataset", choices=datasets, help=f"dataset to train on (default: {datasets[0]}, or the checkpoint's)")
    # The launch script resolves the dataset before the ranks start. This is the name that the user asked for.
    data("--requested-dataset", help=argparse.SUPPRESS)
    folder = f"folder to search for datasets first {default}"
    data("--data-dir", type=Path, default=Path("data"), metavar="DIR", help=folder)

    # `samestep run` passes its run dir, timeout and grace to the program that it starts.
    run_dir = os.environ.get("SAMESTEP_RUN_DIR")
    timeout = os.environ.get("SAMESTEP_TIMEOUT", "300")
    grace = os.environ.get("SAMESTEP_GRACE", "30")
    results = "directory for checkpoints, logs and results (default: runs/<app>/<UTC time>)"
    checkpoint("--run-dir", type=Path, default=run_dir, metavar="DIR", help=results)
    resume = "resume the run in --run-dir; --no-resume archives it and starts a new one (default: resume)"
    checkpoint("--resume", action=argparse.BooleanOptionalAction, default=True, help=resume)
    checkpoint("--init-from", type=Path, metavar="FILE", help="initial weights: the model.safetensors of any run")
    every = f"steps between checkpoints within an epoch; 0 saves only after each epoch and the last step {default}"
    checkpoint("--checkpoint-every", type=count, default=500, metavar="S", help=every)
    checkpoint("--keep-checkpoints", type=positive, default=3, metavar="K", help=f"newest ones to keep {default}")
    best = (
        "save a checkpoint at each evaluation, and write the best one's weights to model-best.safetensors; METRIC is "
        "[min:|max:]NAME of a number that the evaluation returns, such as test_loss"
    )
    checkpoint(
        "--keep-best", nargs="?", type=best_metric(metrics), const=True, default=False, metavar="METRIC", help=best
    )

    restarts = f"maximum number of restarts after failures {default}"
    recovery("--max-restarts", type=count, default=3, metavar="R", help=restarts)
    limit = f"seconds without progress after which the job ends as hung {default}"
    recovery("--timeout", type=seconds, default=timeout, metavar="T", help=limit)
    limit = f"seconds from a stop signal until the job is killed {default}"
    recovery("--grace", type=seconds, default=grace, metavar="T", help=limit)
    factor = f"report a rank X times slower than the others' median; 0 disables {default}"
    recovery("--straggler", type=bounded_float(0.0), default=1.5, metavar="X", help=factor)

    log("--log-every", type=positive, default=10, metavar="S", help=f"steps per line of metrics.jsonl {default}")
    trackers = "trackers to write to, separated by commas: tensorboard, mlflow, wandb (default: none)"
    log("--track", metavar="NAMES", help=trackers)
    log("--quiet", action="store_true", help="print only warnings, errors and the result")


def add_start_method(parser: Parser, default: str | None = None) -> None:
    """Add --start-method, for ranks that torchrun's agent starts; None lets the launcher choose by the machine."""
    method = "fork imports the program once and forks the ranks; exec starts a Python per rank"
    method += f" (default: {default or 'fork; exec on a machine with an NVIDIA driver'})"
    add = parser.group(GROUPS[3]).add_argument
    add("--start-method", choices=START_METHODS, default=default, help=method)


def add_virtual_ranks(parser: Parser, refusal: str = "") -> None:
    """Add --virtual-ranks and --threads; an app with a ``refusal``, its reason, refuses --virtual-ranks."""

    def convert(text: str) -> int | None:
        if refusal:
            raise argparse.ArgumentTypeError(f"not available, because {refusal}: leave it out")
        return bounded_int(0)(text) or None  # None is off, as in checkpoints of earlier versions

    add = parser.group("Training").add_argument
    virtual = "sub-shards per global batch, summed in a fixed tree: same bits at any number of ranks (default: off)"
    add("--virtual-ranks", type=convert, metavar="V", help=argparse.SUPPRESS if refusal else virtual)
    if not refusal:
        threads = "threads per rank (default: OMP_NUM_THREADS, or 1 with --virtual-ranks)"
        add("--threads", type=bounded_int(1), metavar="T", help=threads)


def check_virtual_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if --virtual-ranks is below the number of ``ranks``."""
    if options.virtual_ranks and options.virtual_ranks < ranks:
        raise ConfigError(f"--virtual-ranks {options.virtual_ranks} is below {ranks} ranks: start fewer")


def add_share_gpu(parser: Any) -> None:
    """Add --share-gpu to a parser, or to one of its option groups."""
    share = "let all ranks use the machine's first GPU, for tests and demonstrations; slower than one rank"
    parser.add_argument("--share-gpu", action="store_true", help=share)


def resume_invariants(options: Options) -> dict[str, Any]:
    """Return the options that a resume must repeat, because they decide a run's numbers, as JSON values."""
    mutable = RESUME_MUTABLE.union(options.resume_mutable).difference(options.resume_pinned)
    return {name: value for name, value in as_json(options).items() if name not in mutable}


def as_json(options: argparse.Namespace) -> dict[str, Any]:
    """Return all options as JSON values, sorted by name. Raises ConfigError for a value without a stable text."""
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

    Numbers, texts, lists and dicts of any class become Python's own, and a set a sorted list. Any other value becomes
    its ``str``.

    Raises:
        ValueError: its ``str`` is an address in memory, which differs between processes.
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


class _LocalRank(argparse.Action):
    """Compare the value with LOCAL_RANK, and store nothing: it does not belong to the run."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        expected = os.environ.get("LOCAL_RANK")
        if values != expected:
            raise ConfigError(
                f"--local-rank {values}, but LOCAL_RANK is {expected or 'not set'}: start the ranks with torchrun"
            )


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Add --local-rank, which torch.distributed.launch passes beside LOCAL_RANK; before torch 2.0 as --local_rank.

    Parsing raises ConfigError if the two differ.
    """
    hidden = argparse.SUPPRESS
    parser.add_argument("--local-rank", "--local_rank", action=_LocalRank, default=hidden, help=hidden)
