"""Every collective, shown, checked and timed.

    bash scripts/run_collectives_lab.sh 4 primitives
    torchrun --standalone --nproc-per-node=4 apps/collectives_lab/primitives.py

Each primitive is one short function below, beside the definition that its result is checked against: what every rank
must hold afterwards, computed from what all ranks held before. A "whole" tensor has a row for each rank, [world_size,
m]; a "part" is one such row, [m].
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from options import parse, timed_calls
from ranks import (
    backend,
    facts,
    gather_json,
    missing_rank,
    reason,
    rendezvous,
    slowest_seconds,
    talk,
    talking,
    write_json,
)
from samestep import FatalError, UserError, env, log
from show import Picture, Table, duration, new_figure, picture, ranks_of, size
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.int64)
LAYOUTS = ("contiguous", "strided", "empty")
SUM = dist.ReduceOp.SUM


# --- the primitives ----------------------------------------------------------------------------------------------
# Each takes this rank's tensor and the root's rank, and returns what this rank then holds: None where the definition
# gives a rank nothing. The first three work in place, as they do in torch.


def broadcast(x: Tensor, root: int) -> Tensor:
    """Whole: everyone gets the root's."""
    return in_place(x, lambda y: dist.broadcast(y, src=root))


def reduce(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor | None:
    """Whole: the root gets the sum of all. What the others then hold is not defined (gloo leaves partial sums)."""
    result = in_place(x, lambda y: dist.reduce(y, dst=root, op=op, group=group))
    return result if dist.get_rank() == root else None


def all_reduce(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor:
    """Whole: everyone gets the sum of all."""
    return in_place(x, lambda y: dist.all_reduce(y, op=op, group=group))


def gather(x: Tensor, root: int) -> Tensor | None:
    """Part: the root gets every rank's, in rank order."""
    if dist.get_rank() != root:
        dist.gather(x.contiguous(), dst=root)
        return None
    whole = x.new_empty(dist.get_world_size(), *x.shape)
    dist.gather(x.contiguous(), list(whole), dst=root)
    return whole


def all_gather(x: Tensor, root: int) -> Tensor:
    """Part: everyone gets every rank's, in rank order."""
    whole = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather(list(whole), x.contiguous())
    return whole


def scatter(x: Tensor, root: int) -> Tensor:
    """Whole: rank i gets row i of the root's."""
    part = x.new_empty(x.shape[1:])
    dist.scatter(part, list(x.contiguous()) if dist.get_rank() == root else None, src=root)
    return part


def reduce_scatter(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor:
    """Whole: rank i gets the sum of all ranks' rows i."""
    part = x.new_empty(x.shape[1:])
    dist.reduce_scatter(part, list(x.contiguous()), op=op, group=group)
    return part


def all_to_all(x: Tensor, root: int) -> Tensor:
    """Whole: rank i gets every rank's row i, in rank order: a transposition."""
    whole = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all(list(whole), list(x.contiguous()))
    return whole


def barrier(x: Tensor, root: int) -> Tensor:
    """Nobody goes on until everyone has come; nothing is sent along."""
    dist.barrier()
    return x


def send_recv(x: Tensor, root: int) -> Tensor:
    """Whole: a ring; rank i gets that of rank i - 1. Both calls block, so neighbours must not both send first."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = neighbours()
    if dist.get_rank() % 2 == 0:
        dist.send(x.contiguous(), dst=to)
        dist.recv(received, src=source)
    else:
        dist.recv(received, src=source)
        dist.send(x.contiguous(), dst=to)
    return received


def isend_irecv(x: Tensor, root: int) -> Tensor:
    """Whole: the same ring; nothing blocks until the result is waited for, so the order does not matter."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = neighbours()
    for work in (dist.isend(x.contiguous(), dst=to), dist.irecv(received, src=source)):
        assert work is not None
        work.wait()
    return received


def neighbours() -> tuple[int, int]:
    """Where this rank sends to and receives from in a ring."""
    rank, count = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % count, (rank - 1) % count


def in_place(x: Tensor, collective: Callable[[Tensor], Any]) -> Tensor:
    """Backends want one piece of memory: a strided tensor goes through a copy."""
    y = x.contiguous()
    collective(y)
    return x if y is x else x.copy_(y)


@dataclass(frozen=True)
class Primitive:
    """A collective beside what it must do: ``definition`` maps all ranks' inputs, a rank and the root to its result.

    ``bus(p)`` is nccl-tests' factor from algorithm to bus bandwidth among p ranks: with it, a number can be compared
    with the hardware's whatever p is. Size there, as here, is that of the whole tensor. Source: nccl-tests,
    doc/PERFORMANCE.md, and src/gather.cu, scatter.cu and sendrecv.cu.
    """

    run: Callable[[Tensor, int], Tensor | None]
    definition: Callable[[list[Tensor], int, int], Tensor | None]
    takes: str  # "whole" or "part"
    bus: Callable[[int], float]
    least_ranks: int = 1


def one(p: int) -> float:
    return 1.0


def others(p: int) -> float:
    return (p - 1) / p


PRIMITIVES = {
    "broadcast": Primitive(broadcast, lambda xs, rank, root: xs[root], "whole", one),
    "reduce": Primitive(reduce, lambda xs, rank, root: total(xs) if rank == root else None, "whole", one),
    "all_reduce": Primitive(all_reduce, lambda xs, rank, root: total(xs), "whole", lambda p: 2 * (p - 1) / p),
    "gather": Primitive(gather, lambda xs, rank, root: torch.stack(xs) if rank == root else None, "part", others),
    "all_gather": Primitive(all_gather, lambda xs, rank, root: torch.stack(xs), "part", others),
    "scatter": Primitive(scatter, lambda xs, rank, root: xs[root][rank], "whole", others),
    "reduce_scatter": Primitive(reduce_scatter, lambda xs, rank, root: total(xs)[rank], "whole", others),
    "all_to_all": Primitive(all_to_all, lambda xs, rank, root: torch.stack([x[rank] for x in xs]), "whole", others),
    "barrier": Primitive(barrier, lambda xs, rank, root: xs[rank], "part", one),
    "send_recv": Primitive(send_recv, lambda xs, rank, root: xs[rank - 1], "whole", one, least_ranks=2),
    "isend_irecv": Primitive(isend_irecv, lambda xs, rank, root: xs[rank - 1], "whole", one, least_ranks=2),
}


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(dim=0)


def tensor(primitive: Primitive, rank: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What ``rank`` holds before: small whole numbers, exact in every dtype, different on every rank and in each place.

    Any rank can compute any other's, so results are checked without a collective.
    """
    p = dist.get_world_size()
    shape = (p, m) if primitive.takes == "whole" else (m,)
    count = p * m if primitive.takes == "whole" else m
    return (10 * (rank + 1) + torch.arange(count, device=device)).reshape(shape).to(dtype)


# --- shown and checked -------------------------------------------------------------------------------------------


def show_values(names: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Each primitive on one number a row: before and after on every rank."""
    shown = []
    for name in names:
        primitive = PRIMITIVES[name]
        x = tensor(primitive, dist.get_rank(), 1, torch.int64, device)
        before = x.flatten().tolist()
        with talk(name):
            after = primitive.run(x, 0)
        ranks = gather_json([before, None if after is None else after.flatten().tolist()], device)
        shown.append({"primitive": name, "root": 0, "ranks": [{"before": b, "after": a} for b, a in ranks]})
    return shown


def check(names: list[str], world: env.World, device: torch.device) -> list[dict[str, Any]]:
    """Each primitive against its definition, for every dtype, layout and root; wrong ranks are listed."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine: list[dict[str, Any]] = []
    for name, dtype, layout in [(name, dtype, layout) for name in names for dtype in DTYPES for layout in LAYOUTS]:
        primitive = PRIMITIVES[name]
        m = 0 if layout == "empty" else 5
        wrong = []
        for root in range(p):
            inputs = [tensor(primitive, each, m, dtype, device) for each in range(p)]
            x = laid_out(inputs[rank], layout)
            with talk(name):
                result = primitive.run(x, root)
            if name == "barrier" and world.node_count == 1:
                wrong += [root] if left_early(device) else []
            expected = primitive.definition(inputs, rank, root)
            if expected is not None and (result is None or not torch.equal(result, expected)):
                wrong.append(root)
        mine.append({"primitive": name, "dtype": str(dtype).removeprefix("torch."), "layout": layout, "wrong": wrong})
    everyones = gather_json(mine, device)
    return [
        {
            **case,
            "roots": p,
            "wrong": {str(r): every[i]["wrong"] for r, every in enumerate(everyones) if every[i]["wrong"]},
        }
        for i, case in enumerate(mine)
    ]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A copy of ``x`` that is one piece of memory, or, strided, every second number of one."""
    if layout != "strided":
        return x.clone()
    x = torch.stack([x, torch.full_like(x, -1)], dim=-1)[..., 0]
    assert not x.is_contiguous()
    return x


def left_early(device: torch.device) -> bool:
    """Whether this rank left the last collective before every rank had entered it. On one machine: one clock."""
    _, begun, ended = talking.events[-1]
    return bool(ended < max(gather_json(begun, device)))


# --- the operators of a reduction --------------------------------------------------------------------------------

REDUCERS = {"all_reduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter}


@dataclass(frozen=True)
class Operator:
    """A reduction operator beside its definition: all ranks' tensors as one, [world_size, ...], to their reduction."""

    op: Any
    definition: Callable[[Tensor], Tensor]
    whole: bool = True  # defined for whole numbers
    floating: bool = True  # defined for floating point
    not_by: str = ""  # the backend that documents that it does not have it

    def defined(self, dtype: torch.dtype) -> bool:
        return self.floating if dtype.is_floating_point else self.whole

    def may_be_refused(self, dtype: torch.dtype, backend: str) -> bool:
        return not self.defined(dtype) or backend == self.not_by


def bitwise(op: Any, of_two: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    return Operator(op, lambda xs: functools.reduce(of_two, xs), floating=False, not_by="nccl")


OPERATORS = {
    "SUM": Operator(SUM, lambda xs: xs.sum(dim=0)),
    # Of whole numbers, the mean need not be one, and backends may round it in different ways.
    "AVG": Operator(dist.ReduceOp.AVG, lambda xs: xs.mean(dim=0), whole=False),
    "PRODUCT": Operator(dist.ReduceOp.PRODUCT, lambda xs: xs.prod(dim=0)),
    "MIN": Operator(dist.ReduceOp.MIN, lambda xs: xs.amin(dim=0)),
    "MAX": Operator(dist.ReduceOp.MAX, lambda xs: xs.amax(dim=0)),
    "BAND": bitwise(dist.ReduceOp.BAND, torch.bitwise_and),
    "BOR": bitwise(dist.ReduceOp.BOR, torch.bitwise_or),
    "BXOR": bitwise(dist.ReduceOp.BXOR, torch.bitwise_xor),
}


def operand(rank: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What ``rank`` reduces, [world_size, m]: 3 to 10, so that every operator gives something else."""
    p = dist.get_world_size()
    return (3 + (2 * rank + torch.arange(p * m, device=device)) % 8).reshape(p, m).to(dtype)


def reduced(name: str, operator: Operator, inputs: list[Tensor], root: int) -> Tensor | None:
    """What this rank holds after collective ``name``, by definition; None where it gives this rank nothing."""
    rank = dist.get_rank()
    if name == "reduce" and rank != root:
        return None
    result = operator.definition(torch.stack(inputs))
    return result[rank] if name == "reduce_scatter" else result


def is_right(result: Tensor | None, expected: Tensor | None, p: int) -> bool:
    """Whether they are equal; in floating point up to the rounding of a product or mean of p numbers, which has no
    order of its own. The sums here are exact."""
    if expected is None or result is None:
        return expected is None
    if not expected.is_floating_point():
        return torch.equal(result, expected)
    return torch.allclose(result, expected, rtol=p * torch.finfo(expected.dtype).eps, atol=0)


def refusal(name: str, operator: str, dtype: torch.dtype, group: Any, device: torch.device) -> str | None:
    """What the backend says when it will not reduce so, found by trying once; None where it does.

    Raises FatalError when that fails which the backend must be able to do, and when a rank is missing.
    """
    try:
        with talk(f"{name} with {operator}"):
            REDUCERS[name](operand(dist.get_rank(), 1, dtype, device), 0, OPERATORS[operator].op, group)
    except FatalError as problem:
        said = reason(problem.__cause__ or problem)
        if missing_rank(said) or not OPERATORS[operator].may_be_refused(dtype, backend(device)):
            raise
        return said
    return None


def check_operators(names: list[str], operators: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Each operator by each reducing collective against its definition, for every dtype, layout and root; wrong ones
    are listed by rank. What a backend may refuse is said in its own words; what it accepts though nothing defines it
    is not checked. Raises FatalError where a backend fails at anything else."""
    rank, p = dist.get_rank(), dist.get_world_size()
    with talk("making a group"):  # for what may be refused: a barrier raises again what failed in its group before
        group = dist.new_group(timeout=timedelta(seconds=talking.timeout))
    found = []
    for operator, name, dtype in itertools.product(operators, names, DTYPES):
        refused = next(
            (words for words in gather_json(refusal(name, operator, dtype, group, device), device) if words), ""
        )
        defined, roots = OPERATORS[operator].defined(dtype), range(p if name == "reduce" else 1)
        wrong, cases = [], list(itertools.product(LAYOUTS, roots)) if defined and not refused else []
        for layout, root in cases:
            inputs = [operand(each, 0 if layout == "empty" else 5, dtype, device) for each in range(p)]
            with talk(f"{name} with {operator}"):
                result = REDUCERS[name](laid_out(inputs[rank], layout), root, OPERATORS[operator].op)
            if not is_right(result, reduced(name, OPERATORS[operator], inputs, root), p):
                wrong.append([layout, root])
        everyones = gather_json(wrong, device)
        found.append(
            {
                "operator": operator,
                "primitive": name,
                "dtype": str(dtype).removeprefix("torch."),
                "refused": refused,
                "defined": defined,
                "cases": len(cases),
                "wrong": {str(r): each for r, each in enumerate(everyones) if each},
            }
        )
    return found


def show_operators(checked: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Each operator by each reducing collective on one number a row: before and after on every rank, root 0.

    Whole numbers, or floating point where nothing is defined for those.
    """
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for case in reversed(checked):  # int64 first
        operator, name, dtype = case["operator"], case["primitive"], case["dtype"]
        if case["refused"] or not case["defined"] or (operator, name) in shown:
            continue
        x = operand(dist.get_rank(), 1, getattr(torch, dtype), device)
        before = x.flatten().tolist()
        with talk(f"{name} with {operator}"):
            after = REDUCERS[name](x, 0, OPERATORS[operator].op)
        ranks = gather_json([before, None if after is None else after.flatten().tolist()], device)
        shown[operator, name] = {"operator": operator, "primitive": name, "dtype": dtype,
                                 "ranks": [{"before": b, "after": a} for b, a in ranks]}  # fmt: skip
    return list(reversed(shown.values()))


# --- timed -------------------------------------------------------------------------------------------------------


def sizes(options: Namespace) -> list[int]:
    """Bytes: powers of 4 from 1 KiB to --max-bytes."""
    return [2**k for k in range(10, 60, 2) if 2**k <= options.max_bytes]


def measure(name: str, count: int, repeats: int, world: env.World, device: torch.device) -> dict[str, Any]:
    """Time ``repeats`` calls over a whole tensor of ``count`` bytes (float32), each after a barrier, two to warm up."""
    primitive, p = PRIMITIVES[name], world.world_size
    m = max(1, count // (4 * p))
    x = torch.ones((p, m) if primitive.takes == "whole" else (m,), device=device)
    times = torch.empty(2, repeats, dtype=torch.float64)
    for i in range(-2, repeats):
        with talk(f"barrier before {name}"):
            dist.barrier()
        begun = time.monotonic()
        with talk(name):
            primitive.run(x, 0)
        if i >= 0:
            times[0, i], times[1, i] = begun, time.monotonic()
        x.fill_(1)  # sums would grow until they are no numbers any more, which is slower on some processors
    everyones = torch.tensor(gather_json(times.tolist(), device), dtype=torch.float64)
    return {
        "primitive": name,
        "bytes": 0 if name == "barrier" else 4 * m * p,
        "seconds": slowest_seconds(everyones[:, 0], everyones[:, 1], world),
    }


# --- what goes wrong ---------------------------------------------------------------------------------------------


def demonstrate_fault(options: Namespace, world: env.World, device: torch.device) -> None:
    """One rank fails in the middle of --only's collective. Ends with a FatalError on every other rank."""
    rank, name = world.rank, options.only
    faulty = world.world_size - 1 if options.fault_rank is None else options.fault_rank
    primitive = PRIMITIVES[name]
    m = 1_000_000 // world.world_size
    x = tensor(primitive, rank, m, torch.float32, device)
    with talk(name):  # once as it should be: connections are made, and the fault comes in the middle of things
        primitive.run(x, 0)
    log.info(f"{name} among {world.world_size} ranks; rank {faulty}: {options.fault}")
    if rank == faulty and options.fault in ("killed", "stopped"):
        number = signal.SIGKILL if options.fault == "killed" else signal.SIGSTOP
        threading.Timer(0.5, lambda: os.kill(os.getpid(), number)).start()
    if rank == faulty and options.fault == "missing":
        time.sleep(options.timeout + 5)  # the others give up before
        return
    if rank == faulty and options.fault == "shapes":
        x = tensor(primitive, rank, m + 1, torch.float32, device)
    while True:
        if options.fault == "shapes":
            compare(name, x, device)
        with talk(name):
            primitive.run(x, 0)


def compare(name: str, x: Tensor, device: torch.device) -> None:
    """Raises FatalError when ranks are about to call ``name`` with tensors of different shape or dtype.

    gloo does not look: it aborts the process (signal 6). TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare before each
    collective, as this does, but not before all_to_all, send and recv.
    """
    calls = [f"{dtype} {shape}" for dtype, shape in gather_json([str(x.dtype), list(x.shape)], device)]
    differing = next((r for r, call in enumerate(calls) if call != calls[0]), None)
    if differing is not None:
        raise FatalError(f"{name}: rank {differing} comes with {calls[differing]}, rank 0 with {calls[0]}")


# --- the program -------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse(["primitives", *sys.argv[1:]])
    world, device = rendezvous(options)
    wanted = [options.only] if options.only else list(PRIMITIVES)
    names = [name for name in wanted if PRIMITIVES[name].least_ranks <= world.world_size]
    if not names or (options.fault and world.world_size < 2):
        raise UserError(f"--only {options.only}{' --fault' if options.fault else ''} needs 2 ranks, N is 1: use N=2")
    if options.fault:
        if options.fault_rank is not None and options.fault_rank >= world.world_size:
            raise UserError(f"--fault-rank {options.fault_rank} is not below N={world.world_size}")
        return demonstrate_fault(options, world, device)

    found: dict[str, Any] = {"facts": facts(world, device)}
    found["values"] = show_values(names, device)
    found["checks"] = check(names, world, device)
    found["operator_checks"] = check_operators([name for name in names if name in REDUCERS], options.ops, device)
    found["operators"] = show_operators(found["operator_checks"], device)
    wrong = [case for case in [*found["checks"], *found["operator_checks"]] if case["wrong"]]
    found["timings"] = list(timings(names, options, world, device))
    if world.rank == 0:
        write_json(options.run_dir, f"primitives-{world.world_size}", found)
        for table in tables([found]):
            if not table.long:
                log.info(table.text())
    if wrong:
        raise FatalError(f"{len(wrong)} checks of primitives failed, the first: {wrong[0]}")


def timings(names: list[str], options: Namespace, world: env.World, device: torch.device) -> Iterator[dict[str, Any]]:
    if options.no_timing:
        return
    bar = log.progress(len(sizes(options)) * len(names), 0)
    for count in sizes(options):
        for name in names:
            if name != "barrier" or count == sizes(options)[0]:
                # All ranks must agree how often, so nothing here depends on a clock.
                yield measure(name, count, options.repeats or timed_calls(count), world, device)
            bar.update()
    bar.close()


# --- as tables and pictures --------------------------------------------------------------------------------------


def bandwidths(timing: dict[str, Any], p: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in bytes a second, of the median."""
    algorithm = timing["bytes"] / statistics.median(timing["seconds"])
    return algorithm, algorithm * PRIMITIVES[timing["primitive"]].bus(p)


def tables(results: list[dict[str, Any]]) -> list[Table]:
    """From the JSON of one run dir, one for each number of ranks."""
    made = []
    for found in results:
        p = found["facts"]["world_size"]
        shown = range(min(p, 4))
        made.append(
            Table(
                f"Primitives on {ranks_of(p)}: before → after",
                "Root is rank 0; · is a rank that the definition gives nothing." + (" Ranks 0 to 3." if p > 4 else ""),
                ["primitive", *(f"rank {r}" for r in shown)],
                [
                    [
                        each["primitive"],
                        *(_values(each["ranks"][r]["before"], each["ranks"][r]["after"]) for r in shown),
                    ]
                    for each in found["values"]
                ],
            )
        )
        cases: dict[str, list[dict[str, Any]]] = {}
        for case in found["checks"]:
            cases.setdefault(case["primitive"], []).append(case)
        made.append(
            Table(
                f"Checked against the definition, {ranks_of(p)}",
                f"{', '.join(LAYOUTS)} tensors of float32, float64 and int64, every rank as root.",
                ["primitive", "cases", "right"],
                [
                    [name, str(sum(c["roots"] for c in of)), str(sum(c["roots"] for c in of if not c["wrong"]))]
                    for name, of in cases.items()
                ],
            )
        )
        made += operator_tables(found)
        if not found["timings"]:
            continue
        by = {(t["primitive"], t["bytes"]): t for t in found["timings"] if t["bytes"]}
        names = list(dict.fromkeys(name for name, _ in by))
        # Where p does not divide a power of 2, sizes are a few bytes smaller than asked.
        columns = sorted({size_class(count) for _, count in by}) or [0]  # a barrier alone has no size
        cell = {(name, size_class(count)): t for (name, count), t in by.items()}
        made.append(
            Table(
                f"Median time on {ranks_of(p)}",
                "Whole tensors of this size, float32; from the last rank's entry to the last rank's exit.",
                ["primitive", *(size(c) for c in columns)],
                [
                    *(
                        [
                            name,
                            *(
                                duration(statistics.median(cell[name, c]["seconds"])) if (name, c) in cell else ""
                                for c in columns
                            ),
                        ]
                        for name in names
                    ),
                    *(
                        ["barrier", duration(statistics.median(t["seconds"])), *[""] * (len(columns) - 1)]
                        for t in found["timings"]
                        if not t["bytes"]
                    ),
                ],
            )
        )
        made.append(
            Table(
                f"All timings on {ranks_of(p)}",
                "Quartiles, and algorithm and bus bandwidth as nccl-tests define them.",
                ["primitive", "size", "calls", "median", "25 %", "75 %", "least", "algbw GB/s", "busbw GB/s"],
                [_timing_row(t, p) for t in found["timings"]],
                long=True,
            )
        )
    return made


def operator_tables(found: dict[str, Any]) -> list[Table]:
    """What the operators did, and what a backend refuses; none where no reducing collective was asked for."""
    p, checked = found["facts"]["world_size"], found.get("operator_checks", [])
    if not checked:
        return []
    values = [
        [each["operator"], each["primitive"], *(_values(rank["before"], rank["after"]) for rank in each["ranks"][:4])]
        for each in found["operators"]
    ]
    rows = []
    for operator in dict.fromkeys(case["operator"] for case in checked):
        of = [case for case in checked if case["operator"] == operator]
        cells = [
            _outcome([case for case in of if case["dtype"] == str(dtype).removeprefix("torch.")]) for dtype in DTYPES
        ]
        rows.append([operator, *cells, "; ".join(dict.fromkeys(case["refused"] for case in of if case["refused"]))])
    names = ", ".join(dict.fromkeys(case["primitive"] for case in checked))
    return [
        Table(
            f"Reduction operators on {ranks_of(p)}: before → after",
            "As above; int64, or float64 for a mean." + (" Ranks 0 to 3." if p > 4 else ""),
            ["operator", "primitive", *(f"rank {r}" for r in range(min(p, 4)))],
            values,
        ),
        Table(
            f"Reduction operators checked against their definitions, {ranks_of(p)}",
            f"By {names}; {', '.join(LAYOUTS)} tensors, every rank as reduce's root. Refused: found by trying, in the "
            f"words of {found['facts']['backend']}. Undefined: a mean of whole numbers, bits of floating point.",
            ["operator", *(str(dtype).removeprefix("torch.") for dtype in DTYPES), "it says"],
            rows,
        ),
    ]


def _outcome(cases: list[dict[str, Any]]) -> str:
    """How many cases of one operator and dtype were right on every rank, and which collectives refuse it."""
    refused = [case["primitive"] for case in cases if case["refused"]]
    if len(refused) == len(cases):
        return "refused"
    count = sum(case["cases"] for case in cases)
    wrong = sum(len({tuple(each) for of in case["wrong"].values() for each in of}) for case in cases)
    right = f"{count - wrong} of {count}" if count else "accepted, undefined"
    return right + (f", refused by {', '.join(refused)}" if refused else "")


def size_class(count: int) -> int:
    """The power of 2 that a size was meant to be."""
    return 1 << (count - 1).bit_length()


def _values(before: list[float], after: list[float] | None) -> str:
    return f"{' '.join(f'{x:g}' for x in before)} → {'·' if after is None else ' '.join(f'{x:g}' for x in after)}"


def _timing_row(t: dict[str, Any], p: int) -> list[str]:
    seconds = sorted(t["seconds"])
    quarter, three = (seconds[round(q * (len(seconds) - 1))] for q in (0.25, 0.75))
    rates = [f"{rate / 1e9:.3g}" for rate in bandwidths(t, p)] if t["bytes"] else ["", ""]
    times = [duration(x) for x in (statistics.median(seconds), quarter, three, seconds[0])]
    return [t["primitive"], size(t["bytes"]), str(len(seconds)), *times, *rates]


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    made = []
    for found in results:
        p = found["facts"]["world_size"]
        timed = [t for t in found["timings"] if t["bytes"]]
        if not timed:
            continue
        figure = new_figure(11, 4.5)
        left, right = figure.subplots(1, 2)
        for index, name in enumerate(dict.fromkeys(t["primitive"] for t in timed)):
            mine = [t for t in timed if t["primitive"] == name]
            counts = [t["bytes"] for t in mine]
            style: dict[str, Any] = {
                "marker": "osD^v<>ph*"[index % 10],
                "markersize": 4,
                "label": name,
                "linewidth": 1.2,
            }
            left.plot(counts, [statistics.median(t["seconds"]) * 1e3 for t in mine], **style)
            if p > 1:
                right.plot(counts, [bandwidths(t, p)[1] / 1e9 for t in mine], **style)
        for axes, label in ((left, "median time, ms"), (right, "bus bandwidth, GB/s")):
            axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=label)
            axes.grid(alpha=0.3)
        left.legend(fontsize=7, ncols=2)
        caption = f"Primitives on {ranks_of(p)} over {found['facts']['backend']}: time and bus bandwidth against size."
        made.append(picture(f"primitives-{p}", caption, figure))
    return made


if __name__ == "__main__":
    log.run(main)
