"""The commands of this app and their options. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from samestep import UserError
from samestep.options import Options, Parser, real, whole

COMMANDS = {
    "primitives": "every collective: values before and after, checked against its definition, and timed over sizes",
    "aggregate": "one training, its gradients averaged by ten strategies: time, bytes, messages, loss and accuracy",
    "straggler": "one slow rank: who waits for whom, from timestamps around each collective in every rank",
    "launchers": "the same small job by torchrun, multiprocessing.spawn and Process: what they set, how each fails",
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
FAULTS = ("killed", "stopped", "missing", "shapes")


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
    add("--max-bytes", type=whole(1), default=2**26, metavar="B", help=f"the largest tensor, from 1 KiB up {default}")
    add(
        "--repeats", type=whole(1), metavar="R", help="timed calls of each size (default: 30 to 5, fewer for the large)"
    )
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
    add("--strategies", type=_some_of(STRATEGIES), default=STRATEGIES, metavar="A,B", help=f"{', '.join(STRATEGIES)}")
    add("--ranks", type=_numbers(1), metavar="A,B", help="numbers of ranks to train on (default: 1, 2, 4 up to N, N)")
    add("--rounds", type=whole(1), metavar="R", help="interleaved rounds of one large reduction (default: 10)")
    add("--bytes", type=whole(8), default=2**25, metavar="B", help=f"its size {default}")
    _add_training(made["aggregate"], "(default: 5)")

    add = made["straggler"].add_argument_group("who is slow, and how much").add_argument
    add("--delays", type=_numbers(0), metavar="A,B", help="milliseconds (default: 0,5,10,20,40)")
    add("--steps", type=whole(4), metavar="S", help="updates of each experiment (default: 64)")
    add("--slow-rank", type=whole(0), metavar="R", help="(default: the last)")
    _add_training(made["straggler"], None)

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
    return parser


def _add_training(parser: argparse.ArgumentParser, epochs: str | None) -> None:
    default = "(default: %(default)s)"
    add = parser.add_argument_group("the training (mnist_ddp's model on mnist-5k)").add_argument
    if epochs:
        add("--epochs", type=whole(1), metavar="E", help=f"passes over its 4,000 digits {epochs}")
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


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and check the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.command == "primitives" and options.fault and not options.only:
        raise UserError("--fault needs --only: name the primitive, such as --only all_reduce")
    return options
