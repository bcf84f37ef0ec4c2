"""Define the rows and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from gpu_proof import finetune, kit, several, sharded, single
from gpu_proof.jobs import Row


class Entry(NamedTuple):
    """A row of the proof.

    Attributes:
        name: name of the row in the results.
        call: function that runs the row and returns its figures, or raises an exception.
        half: value of --half that selects the row, 1 or 2.
        alone: whether the row runs alone, because it measures time.
        quick: whether --quick includes the row.
        first: whether all other rows wait for this row.
        patience: factor of --job-limit.
    """

    name: str
    call: Callable[[Row], Mapping[str, Any]]
    half: int
    alone: bool = False
    quick: bool = False
    first: bool = False
    patience: float = 1.0


SLOW = 1.8  # `patience` of the longest rows, such as rows that compile
QUICK = 0.6  # `patience` of rows for which all other rows wait


def plural(ranks: int) -> str:
    if ranks == 1:
        return "1 rank"
    return f"{ranks} ranks"


def entries() -> list[Entry]:
    """Return all rows, the most important first."""
    return [*_several_ranks(), *_second_half(), *_alone()]


def _several_ranks() -> Iterator[Entry]:
    for n in (2, 3):
        call = partial(several.all_reduce, ranks=n)
        yield Entry(f"all-reduce, {n} ranks", call, 1, quick=n == 2, first=True, patience=QUICK)
    yield Entry("bits mnist_ddp", partial(several.bits, app="mnist_ddp"), 1, quick=True)
    yield _killed(3)
    yield _killed(2)
    yield _stopped(3)
    yield Entry("same step mnist_ddp", partial(several.same_step, app="mnist_ddp"), 1, quick=True)
    yield Entry("bits cifar_ddp", partial(several.bits, app="cifar_ddp"), 1)
    yield Entry("same step cifar_ddp", partial(several.same_step, app="cifar_ddp"), 1)
    for n in (3, 2):
        yield Entry(f"hang mnist_ddp, {n} ranks", partial(several.hang, ranks=n), 1, quick=n == 2)
    yield _stopped(2)
    yield _stopped(1)
    yield _killed(1)


def _killed(ranks: int) -> Entry:
    return Entry(f"killed mnist_ddp, {plural(ranks)}", partial(several.killed, ranks=ranks), 1, quick=ranks == 2)


def _stopped(ranks: int) -> Entry:
    return Entry(f"stopped mnist_ddp, {plural(ranks)}", partial(several.stopped, ranks=ranks), 1)


def _second_half() -> Iterator[Entry]:
    yield Entry("sharded gpt_fsdp, meshes", sharded.meshes, 2)
    yield Entry("sharded gpt_fsdp, resume at another mesh", sharded.reshard, 2)
    yield Entry("elastic mnist_elastic", sharded.elastic, 2)
    yield Entry("kit", kit.kit, 2)
    for app, options, tolerance in single.LOSSES:
        name = " ".join(["losses", app, *options])
        patience = SLOW if "--compile" in options else 1.0
        call = partial(single.first_losses, app=app, options=options, tolerance=tolerance)
        yield Entry(name, call, 2, patience=patience)
    for app, n in single.RECOVERY.items():
        yield Entry(f"recovery {app}, {plural(n)}", partial(single.recovery, app=app, ranks=n), 2)
    for n in (3, 2, 1):
        yield Entry(f"collectives collectives_lab, {plural(n)}", partial(single.collectives, ranks=n), 2)


def _alone() -> Iterator[Entry]:
    yield Entry("accuracy mnist_ddp", single.accuracy, 2, alone=True)
    yield Entry("finetune llm_finetune", finetune.finetune, 2, alone=True, patience=SLOW)
    yield Entry("speed mnist_ddp", single.speed, 2, alone=True, quick=True, patience=SLOW)
    for kind in ("eager", "--compile", "CUDA graphs"):
        call = partial(single.compiled, kind=kind)
        yield Entry(f"speed cifar_ddp, {kind}", call, 2, alone=True, patience=SLOW)
