"""The commands of this app and their options. Standard library only."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from samestep import UserError
from samestep.options import Options, Parser, real, whole

COMMANDS = {
    "primitives": "every collective: values before and after, checked against its definition, and timed over sizes",
    "aggregate": "one training, its gradients averaged by ten strategies: time, bytes, messages, loss and accuracy",
    "straggler": "one slow rank: who waits for whom, from timestamps around each collective in every rank",
    "launchers": "the same small job by torchrun, multiprocessing.spawn and Process: what they set, how each fails; "
    "and DataParallel beside DDP",
    "predict": "latency and bandwidth fitted from what primitives measured, and what follows for 65,536 ranks",
    "report": "one self-contained HTML page of everything that the run dir holds",
    "all": "all of these in turn",
}
PRIMITIVES = (
    "broadcast reduce all_reduce gather all_gather scatter reduce_scatter all_to_all barrier send_recv isend_irecv"
).split()
STRATEGIES = (
    "ddp overlap per_parameter all_reduce reduce_broadcast gather_scatter all_gather ring local_1 local_4 local_16"
).split()
OPERATORS = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()
FAULTS = ("killed", "stopped", "missing", "shapes")
RANKS = (1, 2, 4)  # aggregate's numbers of ranks, as far as they are below N; then N
TIMED_CALLS = {2**20: 30, 2**24: 10, math.inf: 5}  # most bytes: primitives' timed calls of tensors up to this size


class Usual(NamedTuple):
    """A default that --quick changes. Its text is what --help says; ``parse`` puts the value in its place."""

    value: Any
    quick: Any
    words: str = ""  # of ``value``, where it is None because the program decides

    def __str__(self) -> str:
        usual, quick = (
            ",".join(map(str, each)) if isinstance(each, tuple) else each for each in (self.value, self.quick)
        )
        return f"{self.words or usual}; {quick} with --quick"


def timed_calls(count: int) -> int:
    """How often primitives times one size of ``count`` bytes, where neither --repeats nor --quick says."""
    return next(calls for most, calls in TIMED_CALLS.items() if count <= most)


def _timed_calls() -> str:
    small, middle = (f"{calls} up to {most >> 20} MiB" for most, calls in TIMED_CALLS.items() if isinstance(most, int))
    return f"{small}, {middle}, {TIMED_CALLS[math.inf]} beyond"


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="See, measure and predict what ranks say to each other: real collectives among N real processes, "
        "as tables, pictures and JSON in the run dir.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    default = "(default: %(default)s)"
    made = {}
    for name, what in COMMANDS.items():
        command_usage = usage.replace("COMMAND", name) if usage else None
        made[name] = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".",
                                         usage=command_usage)  # fmt: skip
        add = made[name].add_argument_group("the run").add_argument
        add("--run-dir", type=Path, metavar="DIR", help="where results go (default: runs/collectives_lab/<UTC time>)")
        add("--quick", action="store_true", help="fewer sizes, steps and repetitions: a few minutes for `all`")
        add(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where every rank has its own"
        )
        add(
            "--timeout",
            type=real(0.0, above=True),
            default=60.0,
            metavar="T",
            help=f"seconds that any one collective may take; then an error names it {default}",
        )
        add("--quiet", action="store_true", help="no tables on the console")

    add = made["primitives"].add_argument_group("what is measured").add_argument
    add("--only", choices=PRIMITIVES, help="one primitive instead of all")
    operators = ", ".join(OPERATORS)
    add("--ops", type=_some_of(OPERATORS), default=OPERATORS, metavar="A,B",
        help=f"operators of all_reduce, reduce and reduce_scatter: {operators} (default: all)")  # fmt: skip
    add("--max-bytes", type=whole(1), default=Usual(2**26, 2**22), metavar="B",
        help=f"the largest tensor, from 1 KiB up {default}")  # fmt: skip
    add("--repeats", type=whole(1), default=Usual(None, 8, _timed_calls()), metavar="R",
        help=f"timed calls of each size {default}")  # fmt: skip
    add("--no-timing", action="store_true", help="values and checks alone")
    add = made["primitives"].add_argument_group("what goes wrong (needs --only)").add_argument
    add(
        "--fault",
        choices=FAULTS,
        help="one rank is killed or stopped in the middle of the collective, never calls it, or has another shape: "
        "the others end with an error that names the collective",
    )
    add("--fault-rank", type=whole(0), metavar="R", help="which (default: the last)")

    add = made["aggregate"].add_argument_group("what is compared").add_argument
    add("--strategies", type=_some_of(STRATEGIES), default=STRATEGIES, metavar="A,B",
        help=f"{', '.join(STRATEGIES)} (default: all)")  # fmt: skip
    add("--ranks", type=_numbers(1), metavar="A,B",
        help=f"numbers of ranks to train on (default: {', '.join(map(str, RANKS))} up to N, N)")  # fmt: skip
    add("--rounds", type=whole(1), default=10, metavar="R", help=f"interleaved rounds of one large reduction {default}")
    add("--bytes", type=whole(8), default=2**25, metavar="B", help=f"its size {default}")
    _add_training(made["aggregate"], epochs=Usual(5, 1))

    add = made["straggler"].add_argument_group("who is slow, and how much").add_argument
    add("--delays", type=_numbers(0), default=Usual((0, 5, 10, 20, 40), (0, 10)), metavar="A,B",
        help=f"milliseconds {default}")  # fmt: skip
    add("--steps", type=whole(4), default=Usual(128, 48), metavar="S", help=f"updates of each experiment {default}")
    add("--slow-rank", type=whole(0), metavar="R", help="(default: the last)")
    _add_training(made["straggler"])

    add = made["launchers"].add_argument_group("the small job").add_argument
    add("--steps", type=whole(2), default=20, metavar="S", help=f"updates {default}")

    add = made["predict"].add_argument_group("what is predicted").add_argument
    add(
        "--compute",
        type=real(0.0),
        default=0.3,
        metavar="S",
        help=f"seconds of computing in a simulated step {default}",
    )
    add("--seed", type=whole(0), default=1, help=f"of the simulation {default}")

    add = made["report"].add_argument_group("the report").add_argument
    add("--markdown", action="store_true", help="also the tables as Markdown, on the console and in report.md")

    for name in ("primitives", "aggregate", "straggler", "launchers"):
        # `python -m torch.distributed.launch` puts it before a program's own arguments; LOCAL_RANK says the same.
        made[name].add_argument("--local-rank", "--local_rank", type=whole(0), help=argparse.SUPPRESS)
    return parser


def _add_training(parser: argparse.ArgumentParser, epochs: Usual | None = None) -> None:
    default = "(default: %(default)s)"
    add = parser.add_argument_group("the training (mnist_ddp's model on mnist-5k)").add_argument
    if epochs:
        add("--epochs", type=whole(1), default=epochs, metavar="E", help=f"passes over its 4,000 digits {default}")
        add("--max-steps", type=whole(1), metavar="S", help="stop at this step")
    add(
        "--global-batch-size", type=whole(1), default=128, metavar="B", help=f"samples a step, over all ranks {default}"
    )
    add("--lr", type=real(0.0, above=True), default=0.03, help=f"learning rate of SGD {default}")
    add("--momentum", type=real(0.0, below=1.0), default=0.9, metavar="M", help=default)
    add("--dropout", type=real(0.0, below=1.0), default=0.5, metavar="P", help=default)
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64 for comparisons")
    add("--seed", type=whole(0), default=1, help=f"decides initial weights, order of samples, dropout {default}")


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An option's type: names out of ``known``, separated by commas."""

    def convert(text: str) -> list[str]:
        names = text.split(",")
        wrong = [name for name in names if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return names

    return convert


def _numbers(least: int) -> Callable[[str], list[int]]:
    """An option's type: whole numbers of at least ``least``, separated by commas."""
    return lambda text: sorted({whole(least)(each) for each in text.split(",")})


def check_ranks(options: Options, ranks: int) -> None:
    """For the launch script: raises UserError on several machines."""
    for name in ("NNODES", "PET_NNODES", "WORLD_SIZE"):
        if os.environ.get(name, "1") not in ("", "1"):
            raise UserError(
                f"{name}={os.environ[name]}, but the lab's bench is one machine: unset it, or start torchrun by hand "
                "(see README.md)"
            )


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and check the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    for name, value in vars(options).items():
        if isinstance(value, Usual):
            setattr(options, name, value.quick if options.quick else value.value)
    if options.command == "primitives" and options.fault and not options.only:
        raise UserError("--fault needs --only: name the primitive, such as --only all_reduce")
    return options
