"""Define the commands of this app and their options. The module uses only the standard library and samestep."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from samestep import ConfigError, env
from samestep.hooks import AppHooks
from samestep.options import Options, Parser, add_share_gpu, bounded_float, bounded_int, seconds

APP = "collectives_lab"
COMMANDS = {
    "primitives": "check every collective against its definition, and time it over sizes",
    "aggregate": "average gradients by twelve strategies: time, bytes, messages, loss, accuracy",
    "straggler": "slow one rank down, and measure each rank's waits at each collective",
    "launchers": "start a small job by torchrun, launch, spawn and Process; compare settings and failures",
    "predict": "fit latency and bandwidth to measurements, and predict 65,536 ranks",
    "report": "write the run dir's results as one self-contained HTML page",
    "all": "run all of these in turn",
}
PRIMITIVES = (
    "broadcast reduce all_reduce gather all_gather scatter reduce_scatter all_to_all barrier send_recv isend_irecv"
).split()
POINT_TO_POINT = ("send_recv", "isend_irecv")
STRATEGIES = (
    *("ddp", "overlap", "module", "per_parameter", "all_reduce", "reduce_broadcast", "gather_scatter", "all_gather"),
    *("ring", "local_1", "local_4", "local_16"),
)
SLOWED = ("all_reduce", "overlap", "local_4", "local_16")  # the strategies that straggler compares by default
PLACES = ("start", "aggregation", "backward", "once")  # places where straggler's ranks sleep
USUAL_PLACES = PLACES[:3]
KINDS = ("constant", "random")
LAUNCHERS = ("torchrun", "torch.distributed.launch", "multiprocessing.spawn", "Process")
OPERATORS = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()
FAULTS = ("killed", "stopped", "missing", "shapes")
RANKS = (1, 2, 4)  # default world sizes of aggregate: N, and each of these numbers that is below N
TIMED_CALLS = {2**20: 30, 2**24: 10, math.inf: 5}  # timed calls per collective; a key is the largest tensor, in bytes
DEFAULT = "(default: %(default)s)"


class QuickDefault(NamedTuple):
    """A default that --quick changes. `parse` replaces this object by a value, and --help prints the object's `str`."""

    value: Any
    quick: Any
    words: str = ""  # description of ``value`` for --help, if ``value`` is None

    def __str__(self) -> str:
        value = self.words or _shown(self.value)
        return f"{value}; {_shown(self.quick)} with --quick"


def _shown(value: Any) -> str:
    """Return a value in its command-line form. Commas separate the items of a tuple."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def timed_calls(count: int) -> int:
    """Return the default number of timed calls in ``primitives`` for a tensor of ``count`` bytes."""
    return next(calls for most, calls in TIMED_CALLS.items() if count <= most)


def _timed_calls() -> str:
    texts = []
    for most, calls in TIMED_CALLS.items():
        if isinstance(most, int):
            texts.append(f"{calls} up to {most >> 20} MiB")
        else:
            texts.append(f"{calls} beyond")
    return ", ".join(texts)


def device_argument(options: Options) -> str:
    """Return the command-line argument that selects the same device for other ranks."""
    if options.share_gpu:
        return "--share-gpu"
    return f"--device={options.device}"


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of all commands. The name of a command replaces COMMAND in ``usage``."""
    description = "Measure and predict collectives among N processes; write tables, pictures and JSON to the run dir."
    parser = Parser(prog=prog, usage=usage, description=description)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    commands = {}
    for name, text in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        own_usage = usage
        if usage:
            own_usage = usage.replace("COMMAND", name)
        commands[name] = subparsers.add_parser(name, help=text, description=description, usage=own_usage)
        commands[name].set_defaults(trace=False)  # for commands without --trace
        _add_run(commands[name])
    for name in ("primitives", "aggregate", "straggler"):
        trace = "write each rank's times before and after each collective, and show who waited for whom"
        commands[name].add_argument("--trace", action="store_true", help=trace)
    for name in ("primitives", "aggregate", "straggler", "launchers"):
        # torch.distributed.launch adds this option before a program's own arguments. The program reads LOCAL_RANK.
        commands[name].add_argument("--local-rank", "--local_rank", type=bounded_int(0), help=argparse.SUPPRESS)
    _add_primitives(commands["primitives"])
    _add_aggregate(commands["aggregate"])
    _add_straggler(commands["straggler"])

    _add_launchers(commands["launchers"])
    _add_predict(commands["predict"])
    add = commands["report"].add_argument_group("Report").add_argument
    add("--markdown", action="store_true", help="also write the tables as Markdown, to the console and report.md")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands have."""
    group = parser.add_argument_group("Run")
    add = group.add_argument
    folder = "directory for results (default: runs/collectives_lab/<UTC time>)"
    add("--run-dir", type=Path, metavar="DIR", help=folder)
    add("--quick", action="store_true", help="use fewer sizes, steps and repetitions; `all` takes minutes")
    devices = "device; auto takes a GPU if each rank has its own (default: auto)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=devices)
    add_share_gpu(group)
    limit = f"maximum seconds of one collective; an error names it after that {DEFAULT}"
    add("--timeout", type=seconds, default=60.0, metavar="T", help=limit)
    add("--quiet", action="store_true", help="print no tables")


def _add_launchers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Small job").add_argument
    add("--steps", type=bounded_int(2), default=20, metavar="S", help=f"number of updates {DEFAULT}")
    launchers = f"launchers to compare: {', '.join(LAUNCHERS)} (default: all)"
    add("--launchers", type=_names(LAUNCHERS), default=LAUNCHERS, metavar="A,B", help=launchers)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Prediction").add_argument
    compute = f"seconds of computation per simulated step {DEFAULT}"
    add("--compute", type=bounded_float(0.0), default=0.3, metavar="S", help=compute)
    add("--seed", type=bounded_int(0, 2**63 - 1), default=1, help=f"seed of the simulation {DEFAULT}")


def _add_primitives(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Measurement").add_argument
    only = f"collective to measure: {', '.join(PRIMITIVES)} (default: all)"
    add("--only", choices=PRIMITIVES, metavar="NAME", help=only)
    operators = f"operators of all_reduce, reduce and reduce_scatter: {', '.join(OPERATORS)} (default: all)"
    add("--ops", type=_names(OPERATORS), default=OPERATORS, metavar="A,B", help=operators)
    largest = f"size of the largest tensor in bytes; the smallest has 1 KiB {DEFAULT}"
    add("--max-bytes", type=bounded_int(1, 2**40), default=QuickDefault(2**26, 2**22), metavar="B", help=largest)
    calls = QuickDefault(None, 8, _timed_calls())
    add("--repeats", type=bounded_int(1), default=calls, metavar="R", help=f"timed calls per size {DEFAULT}")
    add("--no-timing", action="store_true", help="check values without timing")
    add = parser.add_argument_group("Fault injection (needs --only)").add_argument
    fault = "fault of one rank: killed or stopped in the collective, missing from it, or other shapes (default: none)"
    add("--fault", choices=FAULTS, help=fault)
    add("--fault-rank", type=bounded_int(0), metavar="R", help="rank that has the fault (default: the last)")


def _add_aggregate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Comparison").add_argument
    strategies = f"strategies to compare: {', '.join(STRATEGIES)} (default: all)"
    add("--strategies", type=_names(STRATEGIES), default=STRATEGIES, metavar="A,B", help=strategies)
    ranks = f"world sizes to train with (default: {', '.join(map(str, RANKS))} up to N, N)"
    add("--ranks", type=_integers(1), metavar="A,B", help=ranks)
    rounds = f"repetitions of one large reduction, interleaved {DEFAULT}"
    add("--rounds", type=bounded_int(1), default=10, metavar="R", help=rounds)
    large = f"size of the large reduction in bytes {DEFAULT}"
    add("--bytes", type=bounded_int(8, 2**40), default=2**25, metavar="B", help=large)
    add = _add_training(parser)
    epochs = f"passes over the 4,000 training digits {DEFAULT}"
    add("--epochs", type=bounded_int(1), default=QuickDefault(5, 1), metavar="E", help=epochs)
    add("--max-steps", type=bounded_int(1), metavar="S", help="last step (default: none)")


def _add_straggler(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Slow rank").add_argument
    delays = f"delays of the slow rank in milliseconds {DEFAULT}"
    add("--delays", type=_integers(0), default=QuickDefault((0, 5, 10, 20, 40), (0, 10)), metavar="A,B", help=delays)
    steps = f"updates per delay {DEFAULT}"
    add("--steps", type=bounded_int(4), default=QuickDefault(128, 48), metavar="S", help=steps)
    add("--slow-rank", type=bounded_int(0), metavar="R", help="rank that sleeps (default: the last)")
    visible = [name for name in STRATEGIES if name not in ("ddp", "module")]  # these two communicate in backward
    strategies = f"strategies to slow down, of {', '.join(visible)} (default: {','.join(SLOWED)})"
    add("--strategies", type=_names(visible), default=SLOWED, metavar="A,B", help=strategies)
    places = f"places of the sleep, of {', '.join(PLACES)}; once sleeps in the first block only"
    places += f" (default: {','.join(USUAL_PLACES)})"
    add("--where", type=_names(PLACES), default=USUAL_PLACES, metavar="A,B", help=places)
    kinds = f"kinds of sleeps (default: {','.join(KINDS)})"
    add("--kind", type=_names(KINDS), default=KINDS, metavar="A,B", help=kinds)
    sleeps = "sleeps to compare in place of --delays, --where and --kind, in milliseconds, such as once:1,backward:10"
    add("--sleeps", type=_sleeps, metavar="PLACE:MS,...", help=sleeps)
    _add_training(parser)


def _add_training(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Add the options of a training, and return the function that adds more options to the group."""
    add = parser.add_argument_group("Training (mnist_ddp's model on mnist-5k)").add_argument
    batch = f"samples per step, over all ranks {DEFAULT}"
    add("--global-batch-size", type=bounded_int(1), default=128, metavar="B", help=batch)
    add("--lr", type=bounded_float(0.0, above=True), default=0.03, help=f"learning rate of SGD {DEFAULT}")
    add("--momentum", type=bounded_float(0.0, below=1.0), default=0.9, metavar="M", help=f"momentum of SGD {DEFAULT}")
    dropout = f"dropout probability {DEFAULT}"
    add("--dropout", type=bounded_float(0.0, below=1.0), default=0.5, metavar="P", help=dropout)
    add("--dtype", choices=("float32", "float64"), default="float32", help=f"type of weights and gradients {DEFAULT}")
    seed = f"seed of initial weights, sample order and dropout {DEFAULT}"
    add("--seed", type=bounded_int(0, 2**63 - 1), default=1, help=seed)
    return add


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argparse type for a comma-separated list of names in ``known``."""

    def convert(text: str) -> list[str]:
        names = text.split(",")
        wrong = [name for name in names if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return names

    return convert


def _integers(minimum: int) -> Callable[[str], list[int]]:
    """Return an argparse type that converts a comma-separated list to sorted, distinct integers >= ``minimum``."""
    integer = bounded_int(minimum)

    def convert(text: str) -> list[int]:
        return sorted({integer(each) for each in text.split(",")})

    return convert


def _sleeps(text: str) -> list[tuple[str, int]]:
    """Convert the value of --sleeps, such as once:1,backward:10, to pairs of place and milliseconds."""
    milliseconds = bounded_int(1)
    found = []
    for each in text.split(","):
        place, colon, length = each.partition(":")
        if place not in PLACES or not colon:
            raise argparse.ArgumentTypeError(f"{each!r} is not PLACE:MS: use one of {', '.join(PLACES)}")
        found.append((place, milliseconds(length)))
    return list(dict.fromkeys(found))


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError for several machines, or for options that do not suit ``ranks`` ranks.

    The launch script calls this function.
    """
    check_size(options, ranks)
    remedy = "unset it, or start torchrun by hand (see README.md)"
    name, count = env.machine_count(os.environ)
    if count not in ("", "1"):
        raise ConfigError(f"{name}={count}, but the lab's bench is one machine: {remedy}")


def check_size(options: Options, n: int) -> None:
    """Raise ConfigError if the options of ``primitives`` or ``straggler`` do not suit ``n`` ranks."""
    if options.command == "primitives":
        if n < 2 and options.fault:
            raise ConfigError(f"--only {options.only} --fault needs 2 ranks, N is 1: use N=2")
        if n < 2 and options.only in POINT_TO_POINT:
            raise ConfigError(f"--only {options.only} needs 2 ranks, N is 1: use N=2")
        if options.fault_rank is not None and options.fault_rank >= n:
            raise ConfigError(f"--fault-rank {options.fault_rank} is not below N={n}")
    if options.command == "straggler" and options.slow_rank is not None and options.slow_rank >= n:
        raise ConfigError(f"--slow-rank {options.slow_rank} is not below N={n}")


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = build_parser(prog, usage).parse(argv)
    if options.command == "straggler" and options.sleeps:
        _check_sleeps(options)
    for name, value in vars(options).items():
        if isinstance(value, QuickDefault):
            setattr(options, name, value.value)
            if options.quick:
                setattr(options, name, value.quick)
    if options.command == "primitives" and options.fault and not options.only:
        raise ConfigError("--fault needs --only: name the primitive, such as --only all_reduce")
    return options


def _check_sleeps(options: Options) -> None:
    """Raise ConfigError if --sleeps is combined with an option that it replaces."""
    has_defaults = isinstance(options.delays, QuickDefault) and options.where == USUAL_PLACES and options.kind == KINDS
    if not has_defaults:
        raise ConfigError("--sleeps has places and lengths of its own: omit --delays, --where and --kind")


HOOKS: AppHooks[Options] = AppHooks(commands=COMMANDS, check_ranks=check_ranks)
