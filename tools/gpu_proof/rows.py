"""List the rows in the order in which they begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from gpu_proof import several, sharded, single
from gpu_proof.jobs import Row


class Entry(NamedTuple):
    """One row.

    Attributes:
        name: its name, which the results have.
        call: proves it and returns its figures, or raises.
        half: 1 or 2; see --half.
        alone: whether nothing may run beside it, because it measures time.
        quick: whether --quick has it.
        first: whether all others wait for it.
    """

    name: str
    call: Callable[[Row], Mapping[str, Any]]
    half: int
    alone: bool = False
    quick: bool = False
    first: bool = False


def plural(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def entries() -> list[Entry]:
    """Return all rows, the most important first."""
    found = [
        Entry(f"all-reduce, {n} ranks", partial(several.all_reduce, ranks=n), 1, quick=n == 2, first=True)
        for n in (2, 3)
    ]
    found.append(Entry("bits mnist_ddp", partial(several.bits, app="mnist_ddp"), 1, quick=True))
    found += [
        Entry(f"killed mnist_ddp, {plural(n)}", partial(several.killed, ranks=n), 1, quick=n == 2) for n in (3, 2)
    ]
    found.append(Entry("stopped mnist_ddp, 3 ranks", partial(several.stopped, ranks=3), 1))
    found.append(Entry("same step mnist_ddp", partial(several.same_step, app="mnist_ddp"), 1, quick=True))
    found.append(Entry("bits cifar_ddp", partial(several.bits, app="cifar_ddp"), 1))
    found.append(Entry("same step cifar_ddp", partial(several.same_step, app="cifar_ddp"), 1))
    found += [Entry(f"hang mnist_ddp, {plural(n)}", partial(several.hang, ranks=n), 1, quick=n == 2) for n in (3, 2)]
    found += [Entry(f"stopped mnist_ddp, {plural(n)}", partial(several.stopped, ranks=n), 1) for n in (2, 1)]
    found.append(Entry("killed mnist_ddp, 1 rank", partial(several.killed, ranks=1), 1))
    found.append(Entry("sharded gpt_fsdp, meshes", sharded.meshes, 2))
    found.append(Entry("sharded gpt_fsdp, resume at another mesh", sharded.reshard, 2))
    found.append(Entry("elastic mnist_elastic", sharded.elastic, 2))
    found += [Entry(f"collectives, {plural(n)}", partial(single.collectives, ranks=n), 2) for n in (3, 2, 1)]
    found += [
        Entry(f"recovery {app}, {plural(n)}", partial(single.recovery, app=app, ranks=n), 2)
        for app, n in single.RECOVERY.items()
    ]
    found += [
        Entry(
            " ".join(["losses", app, *options]),
            partial(single.first_losses, app=app, options=options, tolerance=tolerance),
            2,
        )
        for app, options, tolerance in single.LOSSES
    ]
    found.append(Entry("accuracy mnist_ddp", single.accuracy, 2, alone=True))
    found.append(Entry("speed mnist_ddp", single.speed, 2, alone=True))
    found += [
        Entry(f"speed cifar_ddp, {kind}", partial(single.compiled, kind=kind), 2, alone=True)
        for kind in ("eager", "--compile", "CUDA graphs")
    ]
    return found
