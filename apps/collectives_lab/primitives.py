"""Show, check and time every collective.

    bash scripts/run_collectives_lab.sh 4 primitives
    torchrun --standalone --nproc-per-node=4 apps/collectives_lab/primitives.py

Each primitive is one short function below. Its result is checked against a definition, which computes each rank's
output from all ranks' inputs. A "whole" tensor has a row for each rank, [world_size, m]; a
"part" is one such row, [m].
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from distributed import (
    collective,
    gather_json,
    gather_nonempty,
    missing_rank,
    reason,
    rendezvous,
    run_metadata,
    session,
    slowest_seconds,
)
from options import check_size, parse, timed_calls
from samestep import NonRetryableError, env, log
from samestep.options import Options
from samestep.torch.distributed import backend
from show import SHOWN_RANKS, Picture, Table, duration, new_figure, picture, publish, ranks_of, size
from strategies import exchange, neighbors
from torch import Tensor
from waits import publish_waits

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
LAYOUTS = {"contiguous": 5, "strided": 5, "empty": 0}  # numbers in a checked row
SUM = dist.ReduceOp.SUM


# --- the primitives ----------------------------------------------------------------------------------------------
# Each takes this rank's tensor and the root's rank, and returns what this rank holds then: None if the definition gives
# it nothing. The first three work in place, as they do in torch.


def broadcast(x: Tensor, root: int) -> Tensor:
    """Whole: every rank gets the root's."""
    return in_place(x, lambda y: dist.broadcast(y, src=root))


def reduce(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor | None:
    """Whole: the root gets the sum of all. The other ranks' result is undefined (gloo leaves partial sums)."""
    result = in_place(x, lambda y: dist.reduce(y, dst=root, op=op, group=group))
    return result if dist.get_rank() == root else None


def all_reduce(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor:
    """Whole: every rank gets the sum of all."""
    return in_place(x, lambda y: dist.all_reduce(y, op=op, group=group))


def gather(x: Tensor, root: int) -> Tensor | None:
    """Part: the root gets every rank's, in rank order."""
    whole = x.new_empty(dist.get_world_size(), *x.shape) if dist.get_rank() == root else None
    dist.gather(x.contiguous(), None if whole is None else list(whole), dst=root)
    return whole


def all_gather(x: Tensor, root: int) -> Tensor:
    """Part: every rank gets every rank's, in rank order."""
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
    """Whole: a transposition, in which rank i gets every rank's row i, in rank order."""
    whole = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all(list(whole), list(x.contiguous()))
    return whole


def barrier(x: Tensor, root: int) -> Tensor:
    """No rank leaves before every rank has entered; no data is exchanged."""
    dist.barrier()
    return x


def send_recv(x: Tensor, root: int) -> Tensor:
    """Whole: a ring, in which rank i gets rank i - 1's. Both calls block, so neighbors must not both send first."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = neighbors()
    if dist.get_rank() % 2 == 0:
        dist.send(x.contiguous(), dst=to)
        dist.recv(received, src=source)
    else:
        dist.recv(received, src=source)
        dist.send(x.contiguous(), dst=to)
    return received


def isend_irecv(x: Tensor, root: int) -> Tensor:
    """Whole: the same ring. Nothing blocks until the rank waits for the result, so the order does not matter."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    exchange(x.contiguous(), received)
    return received


def in_place(x: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    """Run a collective on contiguous memory, as backends require: a strided tensor goes through a copy."""
    y = x.contiguous()
    call(y)
    return x if y is x else x.copy_(y)


@dataclass(frozen=True)
class Primitive:
    """Hold a collective and its definition, which maps all ranks' inputs, a rank and the root to that rank's result.

    ``bus(p)`` is nccl-tests' factor from algorithm to bus bandwidth among p ranks: with it, a number can be compared
    with the hardware's whatever p is. The whole tensor's size counts, as it does there. Source: nccl-tests,
    doc/PERFORMANCE.md, and src/gather.cu, scatter.cu and sendrecv.cu.
    """

    run: Callable[[Tensor, int], Tensor | None]
    definition: Callable[[list[Tensor], int, int], Tensor | None]
    takes: str  # "whole" or "part"
    bus: Callable[[int], float]
    least_ranks: int = 1


def one(p: int) -> float:
    """Return the bus factor of a primitive in which one rank's data cross each link."""
    return 1.0


def others(p: int) -> float:
    """Return the bus factor of a primitive in which each rank keeps its own part."""
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
    """Return the sum of all ranks' tensors."""
    return torch.stack(xs).sum(dim=0)


def tensor(primitive: Primitive, rank: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what ``rank`` holds before: small integers, exact in every dtype, different everywhere.

    Any rank can compute any other's, so results are checked without a collective.
    """
    shape = (dist.get_world_size(), m) if primitive.takes == "whole" else (m,)
    return (10 * (rank + 1) + torch.arange(math.prod(shape), device=device)).reshape(shape).to(dtype)


# --- shown and checked -------------------------------------------------------------------------------------------


def show(name: str, run: Callable[..., Tensor | None], x: Tensor, *arguments: Any) -> list[dict[str, Any]]:
    """Run a collective with root 0 on this rank's ``x``; return all ranks' numbers before and after it."""
    before = x.flatten().tolist()
    with collective(name):
        after = run(x, 0, *arguments)
    return gather_json({"before": before, "after": None if after is None else after.flatten().tolist()})


def show_values(names: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Show each primitive on one number a row."""
    shown = []
    for name in names:
        x = tensor(PRIMITIVES[name], dist.get_rank(), 1, torch.int64, device)
        shown.append({"primitive": name, "root": 0, "ranks": show(name, PRIMITIVES[name].run, x)})
    return shown


def check(names: list[str], world: env.World, device: torch.device) -> list[dict[str, Any]]:
    """Check each primitive against its definition, for every dtype, layout and root; list the wrong ranks."""
    rank, p = dist.get_rank(), dist.get_world_size()
    checks = []
    for name, dtype, layout in itertools.product(names, DTYPES, LAYOUTS):
        primitive, wrong = PRIMITIVES[name], []
        for root in range(p):
            inputs = [tensor(primitive, each, LAYOUTS[layout], DTYPES[dtype], device) for each in range(p)]
            x = laid_out(inputs[rank], layout)
            with collective(name):
                result = primitive.run(x, root)
            early = name == "barrier" and world.node_count == 1 and left_early()
            expected = primitive.definition(inputs, rank, root)
            if early or (expected is not None and not is_right(result, expected)):
                wrong.append(root)
        case = {"primitive": name, "dtype": dtype, "layout": layout, "roots": p}
        checks.append({**case, "wrong": gather_nonempty(wrong)})
    return checks


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a copy of ``x`` that is contiguous, or, strided, every second number of a contiguous tensor."""
    if layout != "strided":
        return x.clone()
    x = torch.stack([x, torch.full_like(x, -1)], dim=-1)[..., 0]
    assert not x.is_contiguous()
    return x


def left_early() -> bool:
    """Return whether this rank left the last collective before every rank had entered it. One machine has one clock."""
    _, begun, ended = session.events[-1]
    return bool(ended < max(gather_json(begun)))


def is_right(result: Tensor | None, expected: Tensor | None, rtol: float = 0.0) -> bool:
    """Return whether the results are equal, except for the relative difference ``rtol``; None equals None."""
    if result is None or expected is None:
        return result is expected
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=rtol, atol=0)


# --- the operators of a reduction --------------------------------------------------------------------------------

REDUCERS = {"all_reduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter}


@dataclass(frozen=True)
class Operator:
    """Hold a reduction operator and its definition: all ranks' tensors, [world_size, ...], to their reduction."""

    op: Any
    definition: Callable[[Tensor], Tensor]
    dtypes: Sequence[str] = tuple(DTYPES)  # that it is defined for
    not_by: str = ""  # the backend that documents that it lacks the operator

    def may_be_refused(self, dtype: str, backend: str) -> bool:
        """Return whether ``backend`` may refuse the operator."""
        return dtype not in self.dtypes or backend == self.not_by


def bitwise(op: Any, of_two: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    """Return the operator that combines the bits of integers."""
    return Operator(op, lambda xs: functools.reduce(of_two, xs), dtypes=["int64"], not_by="nccl")


OPERATORS = {
    "SUM": Operator(SUM, lambda xs: xs.sum(dim=0)),
    # The mean of integers may be no integer, and backends may round it in different ways.
    "AVG": Operator(dist.ReduceOp.AVG, lambda xs: xs.mean(dim=0), dtypes=["float32", "float64"]),
    "PRODUCT": Operator(dist.ReduceOp.PRODUCT, lambda xs: xs.prod(dim=0)),
    "MIN": Operator(dist.ReduceOp.MIN, lambda xs: xs.amin(dim=0)),
    "MAX": Operator(dist.ReduceOp.MAX, lambda xs: xs.amax(dim=0)),
    "BAND": bitwise(dist.ReduceOp.BAND, torch.bitwise_and),
    "BOR": bitwise(dist.ReduceOp.BOR, torch.bitwise_or),
    "BXOR": bitwise(dist.ReduceOp.BXOR, torch.bitwise_xor),
}


def operand(rank: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what ``rank`` reduces, [world_size, m]: 3 to 10, so that every operator gives another result."""
    p = dist.get_world_size()
    return (3 + (2 * rank + torch.arange(p * m, device=device)) % 8).reshape(p, m).to(dtype)


def reduced(name: str, operator: Operator, inputs: list[Tensor], root: int) -> Tensor | None:
    """Return what this rank must hold after collective ``name``; None if the definition gives it nothing."""
    rank = dist.get_rank()
    if name == "reduce" and rank != root:
        return None
    result = operator.definition(torch.stack(inputs))
    return result[rank] if name == "reduce_scatter" else result


def refusal(name: str, operator: str, dtype: str, group: Any, device: torch.device) -> str:
    """Try a reduction once; return the backend's message if it refuses, else "".

    Raises:
        NonRetryableError: the backend must be able to do it, or a rank is missing.
    """
    try:
        with collective(f"{name} with {operator}"):
            REDUCERS[name](operand(dist.get_rank(), 1, DTYPES[dtype], device), 0, OPERATORS[operator].op, group)
    except NonRetryableError as error:
        message = reason(error.__cause__ or error)
        if missing_rank(message) or not OPERATORS[operator].may_be_refused(dtype, backend(device)):
            raise
        return message
    return ""


def check_operators(names: list[str], operators: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Check each operator by each reducing collective, for every dtype, layout and root; list the wrong ranks.

    A refusal is reported in the backend's words. Undefined cases that a backend accepts are not checked.

    Raises:
        NonRetryableError: a backend fails at anything else.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    with collective("new_group"):  # for calls that may fail: a barrier in the same group would then fail, too
        group = dist.new_group(timeout=timedelta(seconds=session.timeout))
    checks = []
    for operator, name, dtype in itertools.product(operators, names, DTYPES):
        numbers, defined = DTYPES[dtype], dtype in OPERATORS[operator].dtypes
        refused = next(filter(None, gather_json(refusal(name, operator, dtype, group, device))), "")
        # Backends order the terms of a product or mean as they like; the sums here are exact.
        rtol = p * torch.finfo(numbers).eps if numbers.is_floating_point else 0.0
        cases = list(itertools.product(LAYOUTS, range(p if name == "reduce" else 1))) if defined and not refused else []
        wrong = []
        for layout, root in cases:
            inputs = [operand(each, LAYOUTS[layout], numbers, device) for each in range(p)]
            with collective(f"{name} with {operator}"):
                result = REDUCERS[name](laid_out(inputs[rank], layout), root, OPERATORS[operator].op)
            if not is_right(result, reduced(name, OPERATORS[operator], inputs, root), rtol):
                wrong.append([layout, root])
        case = {"operator": operator, "primitive": name, "dtype": dtype, "refused": refused, "defined": defined}
        checks.append({**case, "cases": len(cases), "wrong": gather_nonempty(wrong)})
    return checks


def show_operators(checks: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Show each operator by each reducing collective on one number a row.

    They are integers, or floating point if nothing is defined for integers.
    """
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for case in reversed(checks):  # int64 first
        operator, name, dtype = case["operator"], case["primitive"], case["dtype"]
        if not case["refused"] and case["defined"] and (operator, name) not in shown:
            x = operand(dist.get_rank(), 1, DTYPES[dtype], device)
            ranks = show(f"{name} with {operator}", REDUCERS[name], x, OPERATORS[operator].op)
            shown[operator, name] = {"operator": operator, "primitive": name, "dtype": dtype, "ranks": ranks}
    return list(reversed(shown.values()))


# --- timed -------------------------------------------------------------------------------------------------------


def measure(name: str, count: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Time ``repeats`` calls over a whole tensor of ``count`` bytes (float32), each after a barrier; two warm up."""
    primitive, p = PRIMITIVES[name], dist.get_world_size()
    m = max(1, count // (4 * p))
    x = torch.ones((p, m) if primitive.takes == "whole" else (m,), device=device)
    spans = []
    for _ in range(2 + repeats):
        with collective(f"barrier before {name}"):
            dist.barrier()
        with collective(name):
            primitive.run(x, 0)
        spans.append(session.events[-1][1:])
        x.fill_(1)  # sums would grow to infinity, which is slower on some processors
    return {"primitive": name, "bytes": 0 if name == "barrier" else 4 * m * p, "seconds": slowest_seconds(spans[2:])}


# --- what goes wrong ---------------------------------------------------------------------------------------------


def demonstrate_fault(options: Options, world: env.World, device: torch.device) -> None:
    """Let one rank fail in the middle of --only's collective. Every other rank ends with a NonRetryableError."""
    name, fault = options.only, options.fault
    primitive = PRIMITIVES[name]
    faulty = world.world_size - 1 if options.fault_rank is None else options.fault_rank
    m = 1_000_000 // world.world_size
    x = tensor(primitive, world.rank, m, torch.float32, device)
    with collective(name):  # once without the fault: connections are made, and the fault comes later
        primitive.run(x, 0)
    log.info(f"{name} among {world.world_size} ranks; rank {faulty}: {fault}")
    if world.rank == faulty:
        if fault == "missing":
            time.sleep(options.timeout + 5)  # the others give up before
            return
        if fault == "shapes":
            x = tensor(primitive, world.rank, m + 1, torch.float32, device)
        else:
            number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
            threading.Timer(0.5, lambda: os.kill(os.getpid(), number)).start()
    while True:
        if fault == "shapes":
            compare(name, x)
        with collective(name):
            primitive.run(x, 0)


def compare(name: str, x: Tensor) -> None:
    """Raise NonRetryableError if ranks are about to call ``name`` with tensors of different shape or dtype.

    gloo does not check: it aborts the process (signal 6). TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare before
    each collective, as this function does, but not before all_to_all, send and recv.
    """
    calls = gather_json(f"{x.dtype} {list(x.shape)}")
    differing = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if differing is not None:
        raise NonRetryableError(f"{name}: rank {differing} comes with {calls[differing]}, rank 0 with {calls[0]}")


# --- the program -------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the command ``primitives`` on this rank."""
    options = parse(["primitives", *sys.argv[1:]])
    world, device = rendezvous(options)
    check_size(options, world.world_size)
    selected = [options.only] if options.only else list(PRIMITIVES)
    names = [name for name in selected if PRIMITIVES[name].least_ranks <= world.world_size]
    if options.fault:
        return demonstrate_fault(options, world, device)

    result: dict[str, Any] = {"facts": run_metadata(world, device)}
    result["values"] = show_values(names, device)
    result["checks"] = check(names, world, device)
    result["operator_checks"] = check_operators([name for name in names if name in REDUCERS], options.ops, device)
    result["operators"] = show_operators(result["operator_checks"], device)
    wrong = [case for case in [*result["checks"], *result["operator_checks"]] if case["wrong"]]
    result["timings"] = list(timings(names, options, device))
    if world.rank == 0:
        publish(options.run_dir, f"primitives-{world.world_size}", result, tables(result), pictures)
        publish_waits(options, result["facts"])
    if wrong:
        raise NonRetryableError(f"{len(wrong)} checks of primitives failed, the first: {wrong[0]}")


def timings(names: list[str], options: Options, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time each primitive on sizes of 1 KiB to --max-bytes, in powers of 4; the barrier, which has none, once."""
    sizes = [] if options.no_timing else [2**k for k in range(10, 60, 2) if 2**k <= options.max_bytes]
    cases = [(count, name) for count in sizes for name in names if name != "barrier" or count == sizes[0]]
    bar = log.progress(len(cases), 0)
    for count, name in cases:
        # All ranks must agree on the number of calls, so nothing here depends on a clock.
        yield measure(name, count, options.repeats or timed_calls(count), device)
        bar.update()
    bar.close()


# --- as tables and pictures --------------------------------------------------------------------------------------


def bandwidths(timing: dict[str, Any], p: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in bytes/s, of the median time."""
    algorithm = timing["bytes"] / statistics.median(timing["seconds"])
    return algorithm, algorithm * PRIMITIVES[timing["primitive"]].bus(p)


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one number of ranks."""
    p = result["facts"]["world_size"]
    note = "Root is rank 0; · is a rank that the definition gives nothing."
    rows = [[each["primitive"], *before_after(each["ranks"])] for each in result["values"]]
    yield Table(f"Primitives on {ranks_of(p)}: before → after", *rank_columns(p, note, "primitive"), rows)
    cases, right = Counter[str](), Counter[str]()
    for case in result["checks"]:
        cases[case["primitive"]] += case["roots"]
        right[case["primitive"]] += 0 if case["wrong"] else case["roots"]
    yield Table(
        f"Checked against the definition, {ranks_of(p)}",
        f"{', '.join(LAYOUTS)} tensors of float32, float64 and int64, every rank as root.",
        ["primitive", "cases", "right"],
        [[name, str(count), str(right[name])] for name, count in cases.items()],
    )
    yield from operator_tables(result)
    if result["timings"]:
        yield from timing_tables(result["timings"], p)


def rank_columns(p: int, note: str, *names: str) -> tuple[str, list[str]]:
    """Return the note and the header of a table with a column for each of the first ranks."""
    some = f" Ranks 0 to {SHOWN_RANKS - 1}." if p > SHOWN_RANKS else ""
    return note + some, [*names, *(f"rank {rank}" for rank in range(min(p, SHOWN_RANKS)))]


def before_after(ranks: list[dict[str, Any]]) -> list[str]:
    """Return a cell ``before → after`` for each of the first ranks."""

    def numbers(values: list[float] | None) -> str:
        return "·" if values is None else " ".join(f"{x:g}" for x in values)

    return [f"{numbers(rank['before'])} → {numbers(rank['after'])}" for rank in ranks[:SHOWN_RANKS]]


def operator_tables(result: dict[str, Any]) -> list[Table]:
    """Return lines on the operators and on a backend's refusals; [] if no reducing collective was selected."""
    p, checks = result["facts"]["world_size"], result.get("operator_checks", [])
    if not checks:
        return []
    shown = [[each["operator"], each["primitive"], *before_after(each["ranks"])] for each in result["operators"]]
    rows = []
    for operator in dict.fromkeys(case["operator"] for case in checks):
        cases = [case for case in checks if case["operator"] == operator]
        cells = [_outcome([case for case in cases if case["dtype"] == dtype]) for dtype in DTYPES]
        rows.append([operator, *cells, "; ".join(dict.fromkeys(case["refused"] for case in cases if case["refused"]))])
    names = ", ".join(dict.fromkeys(case["primitive"] for case in checks))
    return [
        Table(
            f"Reduction operators on {ranks_of(p)}: before → after",
            *rank_columns(p, "As above; int64, or float64 for a mean.", "operator", "primitive"),
            shown,
        ),
        Table(
            f"Reduction operators checked against their definitions, {ranks_of(p)}",
            f"By {names}; {', '.join(LAYOUTS)} tensors, every rank as reduce's root. Refused: found by trying, in the "
            f"words of {result['facts']['backend']}. Undefined: a mean of integers, bits of floating point.",
            ["operator", *DTYPES, "message"],
            rows,
        ),
    ]


def _outcome(cases: list[dict[str, Any]]) -> str:
    """Return how many cases of one operator and dtype were right on every rank, and which collectives refuse it."""
    refused = [case["primitive"] for case in cases if case["refused"]]
    if len(refused) == len(cases):
        return "refused"
    count = sum(case["cases"] for case in cases)
    wrong = sum(len({tuple(each) for ranks in case["wrong"].values() for each in ranks}) for case in cases)
    right = f"{count - wrong} of {count}" if count else "accepted, undefined"
    return right + (f", refused by {', '.join(refused)}" if refused else "")


def timing_tables(timed: list[dict[str, Any]], p: int) -> Iterator[Table]:
    """Yield the medians, one column a size, and all quartiles and bandwidths."""
    columns = sorted({size_class(t["bytes"]) for t in timed if t["bytes"]}) or [0]  # a barrier alone has no size
    cells = {(t["primitive"], size_class(t["bytes"]) if t["bytes"] else columns[0]): t["seconds"] for t in timed}
    medians = {key: duration(statistics.median(seconds)) for key, seconds in cells.items()}
    names = sorted(dict.fromkeys(t["primitive"] for t in timed), key="barrier".__eq__)  # the barrier last
    yield Table(
        f"Median time on {ranks_of(p)}",
        "Whole tensors of this size, float32; from the last rank's entry to the last rank's exit.",
        ["primitive", *map(size, columns)],
        [[name, *(medians.get((name, column), "") for column in columns)] for name in names],
    )
    yield Table(
        f"All timings on {ranks_of(p)}",
        "Quartiles, and algorithm and bus bandwidth as nccl-tests define them.",
        ["primitive", "size", "calls", "median", "25 %", "75 %", "least", "algbw GB/s", "busbw GB/s"],
        [_timing_row(t, p) for t in timed],
        long=True,
    )


def size_class(count: int) -> int:
    """Return the power of 2 that a size was meant to be: if p does not divide it, the tensor is a few bytes smaller."""
    return 1 << (count - 1).bit_length()


def _timing_row(t: dict[str, Any], p: int) -> list[str]:
    seconds = sorted(t["seconds"])
    quartiles = (seconds[round(q * (len(seconds) - 1))] for q in (0.25, 0.75))
    rates = [f"{rate / 1e9:.3g}" for rate in bandwidths(t, p)] if t["bytes"] else ["", ""]
    times = map(duration, (statistics.median(seconds), *quartiles, seconds[0]))
    return [t["primitive"], size(t["bytes"]), str(len(seconds)), *times, *rates]


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield one picture for each number of ranks: time and bus bandwidth against size."""
    for result in results:
        p = result["facts"]["world_size"]
        timed = [t for t in result["timings"] if t["bytes"]]
        if not timed:
            continue
        figure, (left, right) = new_figure(11, 4.5, columns=2)
        for index, name in enumerate(dict.fromkeys(t["primitive"] for t in timed)):
            own = [t for t in timed if t["primitive"] == name]
            counts, marker = [t["bytes"] for t in own], "osD^v<>ph*"[index % 10]
            style: dict[str, Any] = {"marker": marker, "markersize": 4, "label": name, "linewidth": 1.2}
            left.plot(counts, [statistics.median(t["seconds"]) * 1e3 for t in own], **style)
            if p > 1:
                right.plot(counts, [bandwidths(t, p)[1] / 1e9 for t in own], **style)
        for axes, label in ((left, "median time, ms"), (right, "bus bandwidth, GB/s")):
            axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=label)
            axes.grid(alpha=0.3)
        left.legend(fontsize=7, ncols=2)
        caption = f"Primitives on {ranks_of(p)} over {result['facts']['backend']}: time and bus bandwidth against size."
        yield picture(f"primitives-{p}", caption, figure)


if __name__ == "__main__":
    log.run(main)
