"""Show and check the result of every collective, and measure the collective's time.

    bash scripts/run_collectives_lab.sh 4 primitives
    torchrun --standalone --nproc-per-node=4 apps/collectives_lab/primitives.py

Each primitive is one short function of this file. The program compares its result with a definition, which computes
each rank's output from all ranks' inputs. A "whole" tensor [world_size, m] has a row for each rank. A "part" [m] is one
row.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
MARKERS = "osD^v<>ph*"  # matplotlib's markers, one for each line of a picture
LAYOUTS = {"contiguous": 5, "strided": 5, "empty": 0}  # length of a row in the checks, by layout
SUM = dist.ReduceOp.SUM
FAULT_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


# --- the primitives ----------------------------------------------------------------------------------------------
# Each function receives this rank's tensor and the root's rank. It returns this rank's result, or None if the
# definition has no result for this rank. The first three functions work in place, as in torch.


def broadcast(x: Tensor, root: int) -> Tensor:
    """Copy the root's whole tensor to every rank."""
    y = x.contiguous()
    dist.broadcast(y, src=root)
    return in_place(x, y)


def reduce(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor | None:
    """Reduce all ranks' whole tensors by ``op`` on the root. Other ranks return None: their results are undefined."""
    y = x.contiguous()
    dist.reduce(y, dst=root, op=op, group=group)
    result = in_place(x, y)
    if dist.get_rank() != root:
        return None
    return result


def all_reduce(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor:
    """Reduce all ranks' whole tensors by ``op`` on every rank."""
    y = x.contiguous()
    dist.all_reduce(y, op=op, group=group)
    return in_place(x, y)


def gather(x: Tensor, root: int) -> Tensor | None:
    """Collect all ranks' parts on the root, in rank order."""
    part = x.contiguous()
    if dist.get_rank() != root:
        dist.gather(part, None, dst=root)
        return None
    whole = x.new_empty(dist.get_world_size(), *x.shape)
    dist.gather(part, list(whole), dst=root)
    return whole


def all_gather(x: Tensor, root: int) -> Tensor:
    """Collect all ranks' parts on every rank, in rank order."""
    whole = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather(list(whole), x.contiguous())
    return whole


def scatter(x: Tensor, root: int) -> Tensor:
    """Send row i of the root's whole tensor to rank i."""
    part = x.new_empty(x.shape[1:])
    if dist.get_rank() == root:
        dist.scatter(part, list(x.contiguous()), src=root)
    else:
        dist.scatter(part, None, src=root)
    return part


def reduce_scatter(x: Tensor, root: int, op: Any = SUM, group: Any = None) -> Tensor:
    """Reduce row i of all ranks' whole tensors by ``op`` on rank i."""
    part = x.new_empty(x.shape[1:])
    dist.reduce_scatter(part, list(x.contiguous()), op=op, group=group)
    return part


def all_to_all(x: Tensor, root: int) -> Tensor:
    """Send row i of every rank's whole tensor to rank i, in rank order."""
    whole = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all(list(whole), list(x.contiguous()))
    return whole


def barrier(x: Tensor, root: int) -> Tensor:
    """Wait until every rank has entered the barrier."""
    dist.barrier()
    return x


def send_recv(x: Tensor, root: int) -> Tensor:
    """Exchange whole tensors in a ring by blocking send and recv: rank i gets the tensor of rank i - 1.

    Even ranks send first and odd ranks receive first, because two blocking sends would deadlock.
    """
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
    """Exchange whole tensors in the ring of `send_recv` by isend and irecv, which do not block and need no order."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    exchange(x.contiguous(), received)
    return received


def in_place(x: Tensor, y: Tensor) -> Tensor:
    """Copy ``y``, the contiguous copy of ``x`` that a backend has changed, into ``x``, and return ``x``."""
    if y is not x:
        x.copy_(y)
    return x


@dataclass(frozen=True)
class Primitive:
    """A collective and its definition.

    The bus bandwidth of nccl-tests can be compared with the hardware's bandwidth at any world size. Sizes refer to the
    whole tensor, as in nccl-tests. Source: nccl-tests, doc/PERFORMANCE.md, src/gather.cu, scatter.cu and sendrecv.cu.

    Attributes:
        run: function that calls the collective. Its arguments are this rank's input and the root.
        definition: function that returns a rank's result. Its arguments are all ranks' inputs, the rank and the root.
        takes: input of a rank, "whole" or "part".
        bus: function of the world size that returns bus bandwidth / algorithm bandwidth.
        least_ranks: minimum world size.
    """

    run: Callable[[Tensor, int], Tensor | None]
    definition: Callable[[list[Tensor], int, int], Tensor | None]
    takes: str
    bus: Callable[[int], float]
    least_ranks: int = 1

    def shape(self, m: int) -> tuple[int, ...]:
        """Return the shape of a rank's input with rows of length ``m``."""
        if self.takes == "whole":
            return (dist.get_world_size(), m)
        return (m,)


def one(p: int) -> float:
    """Return the bus factor of a primitive that sends one whole tensor over each link."""
    return 1.0


def others(p: int) -> float:
    """Return the bus factor of a primitive in which each rank keeps its own part of the data."""
    return (p - 1) / p


def twice_others(p: int) -> float:
    """Return the bus factor of all_reduce, which consists of a reduce_scatter and an all_gather."""
    return 2 * (p - 1) / p


# --- definitions: functions of all ranks' inputs, a rank and the root that return the rank's result ----------------


def of_root(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return xs[root]


def own(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return xs[rank]


def of_previous(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return xs[rank - 1]


def row_of_root(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return xs[root][rank]


def row_of_each(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return torch.stack([x[rank] for x in xs])


def total(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return torch.stack(xs).sum(dim=0)


def total_at_root(xs: list[Tensor], rank: int, root: int) -> Tensor | None:
    return total(xs, rank, root) if rank == root else None


def row_of_total(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return total(xs, rank, root)[rank]


def stack(xs: list[Tensor], rank: int, root: int) -> Tensor:
    return torch.stack(xs)


def stack_at_root(xs: list[Tensor], rank: int, root: int) -> Tensor | None:
    return torch.stack(xs) if rank == root else None


PRIMITIVES = {
    "broadcast": Primitive(broadcast, of_root, takes="whole", bus=one),
    "reduce": Primitive(reduce, total_at_root, takes="whole", bus=one),
    "all_reduce": Primitive(all_reduce, total, takes="whole", bus=twice_others),
    "gather": Primitive(gather, stack_at_root, takes="part", bus=others),
    "all_gather": Primitive(all_gather, stack, takes="part", bus=others),
    "scatter": Primitive(scatter, row_of_root, takes="whole", bus=others),
    "reduce_scatter": Primitive(reduce_scatter, row_of_total, takes="whole", bus=others),
    "all_to_all": Primitive(all_to_all, row_of_each, takes="whole", bus=others),
    "barrier": Primitive(barrier, own, takes="part", bus=one),
    "send_recv": Primitive(send_recv, of_previous, takes="whole", bus=one, least_ranks=2),
    "isend_irecv": Primitive(isend_irecv, of_previous, takes="whole", bus=one, least_ranks=2),
}


def tensor(primitive: Primitive, rank: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the input of ``rank``: small integers, which are exact in every dtype and differ between ranks.

    Every rank can compute the inputs of all ranks, so checking a result needs no collective.

    Args:
        primitive: primitive that receives the input.
        rank: rank that has the input.
        m: length of a row.
        dtype: dtype of the tensor.
        device: device of the tensor.
    """
    shape = primitive.shape(m)
    count = torch.arange(math.prod(shape), device=device)
    return (10 * (rank + 1) + count).reshape(shape).to(dtype)


# --- shown and checked -------------------------------------------------------------------------------------------


def show(name: str, run: Callable[..., Tensor | None], x: Tensor, *arguments: Any) -> list[dict[str, Any]]:
    """Run a collective with root 0 on this rank's ``x``, and return all ranks' numbers before and after it."""
    numbers: dict[str, Any] = {"before": x.flatten().tolist(), "after": None}
    with collective(name):
        after = run(x, 0, *arguments)
    if after is not None:
        numbers["after"] = after.flatten().tolist()
    return gather_json(numbers)


def show_values(names: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Run each primitive on rows of length 1, and return all ranks' numbers before and after."""
    shown = []
    for name in names:
        primitive = PRIMITIVES[name]
        x = tensor(primitive, dist.get_rank(), m=1, dtype=torch.int64, device=device)
        ranks = show(name, primitive.run, x)
        shown.append({"primitive": name, "root": 0, "ranks": ranks})
    return shown


def check(names: list[str], world: env.World, device: torch.device) -> list[dict[str, Any]]:
    """Compare each primitive with its definition for every dtype, layout and root.

    Returns:
        A dict for each primitive, dtype and layout. Its "wrong" has the roots with wrong results, by rank.
    """
    p = dist.get_world_size()
    has_one_clock = world.node_count == 1
    checks = []
    for name, dtype, layout in itertools.product(names, DTYPES, LAYOUTS):
        primitive = PRIMITIVES[name]
        m = LAYOUTS[layout]
        wrong = []
        for root in range(p):
            inputs = [tensor(primitive, rank, m, dtype=DTYPES[dtype], device=device) for rank in range(p)]
            result_is_right = check_root(name, inputs, layout, root)
            is_early = name == "barrier" and has_one_clock and left_early()
            if is_early or not result_is_right:
                wrong.append(root)
        case: dict[str, Any] = {"primitive": name, "dtype": dtype, "layout": layout, "roots": p}
        case["wrong"] = gather_nonempty(wrong)
        checks.append(case)
    return checks


def check_root(name: str, inputs: list[Tensor], layout: str, root: int) -> bool:
    """Run a primitive, and return whether this rank's result matches the definition, or has no definition.

    Args:
        name: name of the primitive.
        inputs: inputs of all ranks.
        layout: key of LAYOUTS.
        root: rank of the root.
    """
    rank = dist.get_rank()
    x = laid_out(inputs[rank], layout)
    with collective(name):
        result = PRIMITIVES[name].run(x, root)
    expected = PRIMITIVES[name].definition(inputs, rank, root)
    return expected is None or is_right(result, expected)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a copy of ``x`` that is contiguous, or that is a strided view if ``layout`` is "strided"."""
    if layout != "strided":
        return x.clone()
    pairs = torch.stack([x, torch.full_like(x, -1)], dim=-1)
    strided = pairs[..., 0]
    assert not strided.is_contiguous()
    return strided


def left_early() -> bool:
    """Return whether this rank left the last collective before every rank had entered it.

    The answer is valid only if all ranks run on one machine, where they read the same clock.
    """
    _, begun, ended = session.events[-1]
    last_begun = max(gather_json(begun))
    return bool(ended < last_begun)


def is_right(result: Tensor | None, expected: Tensor | None, rtol: float = 0.0) -> bool:
    """Return whether two results are equal up to the relative difference ``rtol``, or are both None."""
    if result is None or expected is None:
        return result is expected
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=rtol, atol=0)


# --- the operators of a reduction --------------------------------------------------------------------------------

REDUCERS = {"all_reduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter}


@dataclass(frozen=True)
class Operator:
    """A reduction operator, and its definition: a function that reduces all ranks' tensors [world_size, ...]."""

    op: Any
    definition: Callable[[Tensor], Tensor]
    dtypes: Sequence[str] = tuple(DTYPES)  # dtypes for which the operator is defined
    not_by: str = ""  # backend that does not support the operator, according to its documentation

    def may_be_refused(self, dtype: str, backend: str) -> bool:
        """Return whether ``backend`` may reject the operator for ``dtype``."""
        return dtype not in self.dtypes or backend == self.not_by


def bitwise(op: Any, of_two: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    """Return the bitwise operator ``op`` for integers. ``of_two`` defines its result for two tensors."""
    return Operator(op, lambda xs: functools.reduce(of_two, xs), dtypes=["int64"], not_by="nccl")


OPERATORS = {
    "SUM": Operator(SUM, lambda xs: xs.sum(dim=0)),
    # Backends may round a mean of integers in different ways.
    "AVG": Operator(dist.ReduceOp.AVG, lambda xs: xs.mean(dim=0), dtypes=["float32", "float64"]),
    "PRODUCT": Operator(dist.ReduceOp.PRODUCT, lambda xs: xs.prod(dim=0)),
    "MIN": Operator(dist.ReduceOp.MIN, lambda xs: xs.amin(dim=0)),
    "MAX": Operator(dist.ReduceOp.MAX, lambda xs: xs.amax(dim=0)),
    "BAND": bitwise(dist.ReduceOp.BAND, torch.bitwise_and),
    "BOR": bitwise(dist.ReduceOp.BOR, torch.bitwise_or),
    "BXOR": bitwise(dist.ReduceOp.BXOR, torch.bitwise_xor),
}


def operand(rank: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the input of ``rank`` [world_size, m] for a reduction: integers from 3 to 10, in ``dtype``."""
    p = dist.get_world_size()
    count = torch.arange(p * m, device=device)
    numbers = 3 + (2 * rank + count) % 8
    return numbers.reshape(p, m).to(dtype)


def reduced(name: str, operator: Operator, inputs: list[Tensor], root: int) -> Tensor | None:
    """Return this rank's result of the reduction ``name`` by definition, or None if the rank gets no result."""
    rank = dist.get_rank()
    if name == "reduce" and rank != root:
        return None
    result = operator.definition(torch.stack(inputs))
    if name == "reduce_scatter":
        return result[rank]
    return result


def refusal(name: str, operator: str, dtype: str, group: Any, device: torch.device) -> str:
    """Try a reduction, and return the backend's message if the backend rejects it, otherwise "".

    Args:
        name: name of the reduction.
        operator: name of the operator.
        dtype: key of DTYPES.
        group: process group for the call.
        device: device of the tensors.

    Raises:
        NonRetryableError: the reduction failed although the backend must support it, or a rank is missing.
    """
    x = operand(dist.get_rank(), 1, DTYPES[dtype], device)
    try:
        with collective(f"{name} with {operator}"):
            REDUCERS[name](x, 0, op=OPERATORS[operator].op, group=group)
    except NonRetryableError as error:
        message = reason(error.__cause__ or error)
        may_be_refused = OPERATORS[operator].may_be_refused(dtype, backend(device))
        if missing_rank(message) or not may_be_refused:
            raise
        return message
    return ""


def check_operators(names: list[str], operators: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Compare each operator in each reduction with its definition for every dtype, layout and root.

    The result lists the wrong cases by rank. If the backend rejects an operator, the result has the backend's message.
    The function does not check undefined cases that the backend accepts.

    Raises:
        NonRetryableError: a supported reduction failed.
    """
    with collective("new_group"):  # a separate group, because later barriers in a group with a failed call fail too
        group = dist.new_group(timeout=timedelta(seconds=session.timeout))
    checks = []
    for operator, name, dtype in itertools.product(operators, names, DTYPES):
        defined = dtype in OPERATORS[operator].dtypes
        refusals = gather_json(refusal(name, operator, dtype, group, device))
        refused = next((message for message in refusals if message), "")
        cases: list[tuple[str, int]] = []
        if defined and not refused:
            roots = dist.get_world_size() if name == "reduce" else 1
            cases = list(itertools.product(LAYOUTS, range(roots)))
        wrong = []
        for layout, root in cases:
            if not check_operator(name, operator, dtype, layout, root=root, device=device):
                wrong.append([layout, root])
        case: dict[str, Any] = {"operator": operator, "primitive": name, "dtype": dtype}
        case["refused"] = refused
        case["defined"] = defined
        case["cases"] = len(cases)
        case["wrong"] = gather_nonempty(wrong)
        checks.append(case)
    return checks


def check_operator(name: str, operator: str, dtype: str, layout: str, *, root: int, device: torch.device) -> bool:
    """Run a reduction, and return whether this rank's result matches the operator's definition.

    Args:
        name: name of the reduction.
        operator: name of the operator.
        dtype: key of DTYPES.
        layout: key of LAYOUTS.
        root: rank of the root.
        device: device of the tensors.
    """
    p = dist.get_world_size()
    rank = dist.get_rank()
    numbers = DTYPES[dtype]
    # Backends may compute a product or mean in any order. Sums of these small integers are exact.
    rtol = p * torch.finfo(numbers).eps if numbers.is_floating_point else 0.0
    inputs = [operand(each, LAYOUTS[layout], numbers, device) for each in range(p)]
    x = laid_out(inputs[rank], layout)
    with collective(f"{name} with {operator}"):
        result = REDUCERS[name](x, root, op=OPERATORS[operator].op)
    expected = reduced(name, OPERATORS[operator], inputs, root)
    return is_right(result, expected, rtol)


def show_operators(checks: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Run each operator in each reduction on rows of length 1, and return all ranks' numbers before and after.

    The numbers are int64 if the checks include the operator for int64, otherwise float64 or float32.
    """
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for case in reversed(checks):  # reversed, so that int64 comes first
        operator = case["operator"]
        name = case["primitive"]
        is_checked = case["defined"] and not case["refused"]
        if is_checked and (operator, name) not in shown:
            x = operand(dist.get_rank(), 1, DTYPES[case["dtype"]], device)
            ranks = show(f"{name} with {operator}", REDUCERS[name], x, OPERATORS[operator].op)
            shown[operator, name] = {"operator": operator, "primitive": name, "dtype": case["dtype"], "ranks": ranks}
    return list(reversed(shown.values()))


# --- timed -------------------------------------------------------------------------------------------------------


def measure(name: str, count: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Measure ``repeats`` calls on a whole float32 tensor of ``count`` bytes, after two calls to warm up.

    A barrier precedes each call. If ``count`` is not a multiple of 4 * world size, the tensor is a few bytes smaller.

    Args:
        name: name of the primitive.
        count: size of the whole tensor, in bytes.
        repeats: number of timed calls.
        device: device of the tensor.
    """
    primitive = PRIMITIVES[name]
    p = dist.get_world_size()
    m = max(1, count // (4 * p))
    x = torch.ones(primitive.shape(m), device=device)
    spans = []
    for _ in range(2 + repeats):
        with collective(f"barrier before {name}"):
            dist.barrier()
        with collective(name):
            primitive.run(x, 0)
        spans.append(session.events[-1][1:])
        x.fill_(1)  # otherwise, sums would grow to infinity, which slows some processors down
    timing: dict[str, Any] = {"primitive": name, "bytes": 4 * m * p}
    if name == "barrier":
        timing["bytes"] = 0
    timing["seconds"] = slowest_seconds(spans[2:])
    return timing


# --- what goes wrong ---------------------------------------------------------------------------------------------


def demonstrate_fault(options: Options, world: env.World, device: torch.device) -> None:
    """Make one rank fail in the collective of --only. On the other ranks, the collective fails or times out."""
    name = options.only
    fault = options.fault
    primitive = PRIMITIVES[name]
    faulty = options.fault_rank
    if faulty is None:
        faulty = world.world_size - 1
    m = 1_000_000 // world.world_size
    x = tensor(primitive, world.rank, m, torch.float32, device)
    with collective(name):  # one call without the fault establishes the connections
        primitive.run(x, 0)
    log.info(f"{name} among {world.world_size} ranks; rank {faulty}: {fault}")
    if world.rank == faulty:
        if fault == "missing":
            time.sleep(options.timeout + 5)  # the other ranks time out first
            return
        if fault == "shapes":
            x = tensor(primitive, world.rank, m + 1, torch.float32, device)
        if fault in FAULT_SIGNALS:
            threading.Timer(0.5, os.kill, [os.getpid(), FAULT_SIGNALS[fault]]).start()
    while True:
        if fault == "shapes":
            compare(name, x)
        with collective(name):
            primitive.run(x, 0)


def compare(name: str, x: Tensor) -> None:
    """Raise NonRetryableError if ranks are about to call ``name`` with tensors of different shape or dtype.

    gloo would otherwise abort the process (signal 6). If TORCH_DISTRIBUTED_DEBUG is DETAIL, torch compares shapes and
    dtypes before each collective except all_to_all, send and recv.
    """
    calls = gather_json(f"{x.dtype} {list(x.shape)}")
    differing = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if differing is not None:
        raise NonRetryableError(f"{name}: rank {differing} comes with {calls[differing]}, rank 0 with {calls[0]}")


# --- the program -------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the command ``primitives`` on this rank.

    Raises:
        NonRetryableError: a collective failed, or a result differs from its definition.
    """
    options = parse(["primitives", *sys.argv[1:]])
    world, device = rendezvous(options)
    check_size(options, world.world_size)
    if options.fault:
        demonstrate_fault(options, world, device)
        return

    selected = [options.only] if options.only else list(PRIMITIVES)
    names = [name for name in selected if PRIMITIVES[name].least_ranks <= world.world_size]
    reducers = [name for name in names if name in REDUCERS]
    result: dict[str, Any] = {"facts": run_metadata(world, device)}
    result["values"] = show_values(names, device)
    result["checks"] = check(names, world, device)
    result["operator_checks"] = check_operators(reducers, options.ops, device)
    result["operators"] = show_operators(result["operator_checks"], device)
    result["timings"] = list(timings(names, options, device))
    checks = [*result["checks"], *result["operator_checks"]]
    wrong = [case for case in checks if case["wrong"]]
    if world.rank == 0:
        publish(options.run_dir, f"primitives-{world.world_size}", result, tables(result), pictures)
        publish_waits(options, result["facts"])
    if wrong:
        raise NonRetryableError(f"{len(wrong)} checks of primitives failed, the first: {wrong[0]}")


def timings(names: list[str], options: Options, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a timing of each primitive at 1 KiB, 4 KiB, 16 KiB and so on up to --max-bytes, and one of the barrier."""
    if options.no_timing:
        return
    sizes = [2**k for k in range(10, 60, 2) if 2**k <= options.max_bytes]
    cases = []
    for count in sizes:
        for name in names:
            if name != "barrier" or count == sizes[0]:
                cases.append((count, name))
    bar = log.progress(len(cases), 0)
    for count, name in cases:
        # The number of calls does not depend on measured times, because it must be the same on all ranks.
        repeats = options.repeats or timed_calls(count)
        yield measure(name, count, repeats, device)
        bar.update()
    bar.close()


# --- as tables and pictures --------------------------------------------------------------------------------------


def bandwidths(timing: dict[str, Any], p: int) -> tuple[float, float]:
    """Return the algorithm bandwidth and the bus bandwidth at the median time of ``p`` ranks, in bytes/s."""
    algorithm = timing["bytes"] / statistics.median(timing["seconds"])
    bus_factor = PRIMITIVES[timing["primitive"]].bus(p)
    return algorithm, algorithm * bus_factor


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one world size."""
    p = result["facts"]["world_size"]
    note = "Root is rank 0; · is a rank that the definition gives nothing."
    rows = [[each["primitive"], *before_after(each["ranks"])] for each in result["values"]]
    yield Table(
        f"Primitives on {ranks_of(p)}: before → after",
        rank_note(p, note),
        header=["primitive", *rank_names(p)],
        rows=rows,
    )
    cases = Counter[str]()
    right = Counter[str]()
    for case in result["checks"]:
        name = case["primitive"]
        cases[name] += case["roots"]
        right[name] += 0 if case["wrong"] else case["roots"]
    yield Table(
        f"Checked against the definition, {ranks_of(p)}",
        f"{', '.join(LAYOUTS)} tensors of float32, float64 and int64, every rank as root.",
        header=["primitive", "cases", "right"],
        rows=[[name, str(count), str(right[name])] for name, count in cases.items()],
    )
    yield from operator_tables(result)
    if result["timings"]:
        yield from timing_tables(result["timings"], p)


def rank_names(p: int) -> list[str]:
    """Return the column headers of at most SHOWN_RANKS ranks."""
    return [f"rank {rank}" for rank in range(min(p, SHOWN_RANKS))]


def rank_note(p: int, note: str) -> str:
    """Return the note of a table. If the table does not show all ranks, the note lists the shown ranks."""
    if p > SHOWN_RANKS:
        return f"{note} Ranks 0 to {SHOWN_RANKS - 1}."
    return note


def before_after(ranks: list[dict[str, Any]]) -> list[str]:
    """Return a cell ``before → after`` for each of the first SHOWN_RANKS ranks."""

    def numbers(values: list[float] | None) -> str:
        if values is None:
            return "·"
        return " ".join(f"{x:g}" for x in values)

    cells = []
    for rank in ranks[:SHOWN_RANKS]:
        before = numbers(rank["before"])
        after = numbers(rank["after"])
        cells.append(f"{before} → {after}")
    return cells


def operator_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield tables of the operators and of the checks, if a reduction was selected."""
    p = result["facts"]["world_size"]
    checks = result.get("operator_checks", [])
    if not checks:
        return
    yield Table(
        f"Reduction operators on {ranks_of(p)}: before → after",
        rank_note(p, "As above; int64, or float64 for a mean."),
        header=["operator", "primitive", *rank_names(p)],
        rows=[[each["operator"], each["primitive"], *before_after(each["ranks"])] for each in result["operators"]],
    )
    operators = unique(case["operator"] for case in checks)
    names = unique(case["primitive"] for case in checks)
    yield Table(
        f"Reduction operators checked against their definitions, {ranks_of(p)}",
        f"By {', '.join(names)}; {', '.join(LAYOUTS)} tensors, every rank as reduce's root. Refused: found by trying, "
        f"in the words of {result['facts']['backend']}. Undefined: a mean of integers, bits of floating point.",
        header=["operator", *DTYPES, "message"],
        rows=[_operator_row(operator, checks) for operator in operators],
    )


def unique(values: Iterable[str]) -> list[str]:
    """Return the distinct values in the order of their first occurrence."""
    return list(dict.fromkeys(values))


def _operator_row(operator: str, checks: list[dict[str, Any]]) -> list[str]:
    cases = [case for case in checks if case["operator"] == operator]
    cells = []
    for dtype in DTYPES:
        cells.append(_outcome([case for case in cases if case["dtype"] == dtype]))
    messages = unique(case["refused"] for case in cases if case["refused"])
    return [operator, *cells, "; ".join(messages)]


def _outcome(cases: list[dict[str, Any]]) -> str:
    """Return a table cell for one operator and dtype: the number of correct cases, and the rejecting reductions."""
    refused = [case["primitive"] for case in cases if case["refused"]]
    if len(refused) == len(cases):
        return "refused"
    count = sum(case["cases"] for case in cases)
    wrong = sum(_count_wrong(case) for case in cases)
    outcome = f"{count - wrong} of {count}" if count else "accepted, undefined"
    if refused:
        outcome = f"{outcome}, refused by {', '.join(refused)}"
    return outcome


def _count_wrong(case: dict[str, Any]) -> int:
    """Return the number of combinations of layout and root that were wrong on at least one rank."""
    wrong: set[tuple[str, int]] = set()
    for of_rank in case["wrong"].values():
        wrong.update(tuple(each) for each in of_rank)
    return len(wrong)


def timing_tables(timed: list[dict[str, Any]], p: int) -> Iterator[Table]:
    """Yield a table of medians with a column per size, and a table of all quartiles and bandwidths."""
    columns = sorted({size_class(t["bytes"]) for t in timed if t["bytes"]})
    columns = columns or [0]  # the program measured only the barrier, which has no size
    medians: dict[str, dict[int, str]] = {}
    for t in timed:
        column = size_class(t["bytes"]) if t["bytes"] else columns[0]
        of_primitive = medians.setdefault(t["primitive"], {})
        of_primitive[column] = duration(statistics.median(t["seconds"]))
    rows = []
    for name in sorted(medians, key="barrier".__eq__):  # moves the barrier to the end
        cells = [medians[name].get(column, "") for column in columns]
        rows.append([name, *cells])
    yield Table(
        f"Median time on {ranks_of(p)}",
        "Whole tensors of this size, float32; from the last rank's entry to the last rank's exit.",
        header=["primitive", *map(size, columns)],
        rows=rows,
    )
    yield Table(
        f"All timings on {ranks_of(p)}",
        "Quartiles, and algorithm and bus bandwidth as nccl-tests define them.",
        header=["primitive", "size", "calls", "median", "25 %", "75 %", "least", "algbw GB/s", "busbw GB/s"],
        rows=[_timing_row(t, p) for t in timed],
        long=True,
    )


def size_class(count: int) -> int:
    """Round ``count`` bytes up to a power of 2, because a tensor may be a few bytes smaller than its nominal size."""
    return 1 << (count - 1).bit_length()


def _timing_row(t: dict[str, Any], p: int) -> list[str]:
    seconds = sorted(t["seconds"])
    last = len(seconds) - 1
    quartiles = [seconds[round(0.25 * last)], seconds[round(0.75 * last)]]
    times = [statistics.median(seconds), *quartiles, seconds[0]]
    rates = ["", ""]
    if t["bytes"]:
        rates = [f"{rate / 1e9:.3g}" for rate in bandwidths(t, p)]
    return [t["primitive"], size(t["bytes"]), str(len(seconds)), *map(duration, times), *rates]


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield one picture of time and bus bandwidth against size for each world size."""
    for result in results:
        timed = [t for t in result["timings"] if t["bytes"]]
        if timed:
            yield _picture(result["facts"], timed)


def _picture(facts: dict[str, Any], timed: list[dict[str, Any]]) -> Picture:
    p = facts["world_size"]
    figure, (left, right) = new_figure(11, 4.5, columns=2)
    names = unique(t["primitive"] for t in timed)
    for index, name in enumerate(names):
        of_name = [t for t in timed if t["primitive"] == name]
        counts = [t["bytes"] for t in of_name]
        medians = [statistics.median(t["seconds"]) * 1e3 for t in of_name]
        marker = MARKERS[index % len(MARKERS)]
        style: dict[str, Any] = {"marker": marker, "markersize": 4, "label": name, "linewidth": 1.2}
        left.plot(counts, medians, **style)
        if p > 1:
            rates = [bandwidths(t, p)[1] / 1e9 for t in of_name]
            right.plot(counts, rates, **style)
    left.set_ylabel("median time, ms")
    right.set_ylabel("bus bandwidth, GB/s")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="bytes")
        axes.grid(alpha=0.3)
    left.legend(fontsize=7, ncols=2)
    caption = f"Primitives on {ranks_of(p)} over {facts['backend']}: time and bus bandwidth against size."
    return picture(f"primitives-{p}", caption, figure)


if __name__ == "__main__":
    log.run(main)
