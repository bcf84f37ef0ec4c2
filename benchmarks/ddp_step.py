"""Measure how much each of several changes speeds up mnist_ddp's training step on CPU.

    OMP_NUM_THREADS=1 .venvs/mnist_ddp/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        benchmarks/ddp_step.py [--rounds 25] [--compile]
    ... benchmarks/ddp_step.py --check      # only check the gradients of the variants with a hook

All variants take turns in one job, on the same global batches of 128 real digits in memory. Times are medians, in
milliseconds. A ratio compares a variant with the same round's plain step (contiguous tensors, stock DDP and SGD).
``--compile`` adds torch.compile, which needs a C++ compiler.

The variants with a hook replace DDP's all-reduce by sums in rank order. Such a sum does not depend on a gradient's
place in a bucket. From 3 ranks on, the sum of a ring all-reduce depends on this place. All gradients of this model fit
in one bucket of 87 KB.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
from arguments import at_least  # noqa: E402
from data import load  # noqa: E402
from model import build_model  # noqa: E402
from samestep.sharding import GlobalBatches  # noqa: E402
from samestep.torch.reduction import ordered_all_reduce  # noqa: E402

BATCH = 128  # images of a global batch
AT_ONCE = 4  # steps that are timed together
CONTIGUOUS = torch.contiguous_format
CHANNELS_LAST = torch.channels_last
Shards = list[tuple[Tensor, Tensor, int]]  # images, labels, size of the global batch


def in_rank_order(rows: Tensor) -> Tensor:
    """Return the mean [n] of the ranks' rows [world_size, n], which are summed in rank order."""
    return sum(rows) / len(rows)  # type: ignore[return-value]  # Python's sum keeps the order, unlike torch.sum


def gather(local: Tensor) -> Future[Tensor]:
    """Return a future of the mean of all ranks' buckets ``local``. Each rank gathers and sums all buckets.

    A rank receives (p - 1) n bytes, for p ranks and buckets of n bytes.
    """
    gathered = local.new_empty(dist.get_world_size(), len(local))
    done = dist.all_gather_single(gathered.view(-1), local, async_op=True).get_future()  # collective
    return done.then(lambda done: in_rank_order(gathered))  # type: ignore[no-any-return]


def exchange(local: Tensor) -> Future[Tensor]:
    """Return a future of the mean of all ranks' buckets ``local``. Each rank sums one part, and sends it to all ranks.

    A rank sends 2 (p - 1) / p n bytes, as in a ring, for p ranks and buckets of n bytes. The hook blocks, because
    gloo's threads cannot wait for each other. So the rank computes no gradients during the exchange.
    """
    p = dist.get_world_size()
    parts = F.pad(local, (0, -len(local) % p)).view(p, -1)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)  # collective
    dist.all_gather_single(parts.view(-1), in_rank_order(received))  # collective
    done: Future[Tensor] = Future()
    done.set_result(parts.view(-1)[: len(local)])
    return done


def by_rank_0(local: Tensor) -> Future[Tensor]:
    """Return a future of the mean of all ranks' buckets ``local``. Rank 0 sums and broadcasts, as in mnist_ddp."""
    ordered_all_reduce(local)
    done: Future[Tensor] = Future()
    done.set_result(local.div_(dist.get_world_size()))
    return done


Hook = Callable[[Tensor], Future[Tensor]]


def hooked(hook: Hook, model: nn.Module, **ddp: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model, **ddp)
    wrapped.register_comm_hook(None, lambda state, bucket: hook(bucket.buffer()))
    return wrapped


def variant(
    shards: Shards,
    weights: torch.memory_format | None = None,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    inner: Callable[[nn.Module], nn.Module] = lambda model: model,
    **sgd: Any,
) -> Callable[[], object]:
    """Return a function that runs a training step.

    Args:
        shards: the batches of this rank, which repeat.
        weights: memory format of the convolutions' weights; None keeps the app's format.
        wrap: function that wraps the model so that ranks exchange gradients; DDP by default.
        inner: function that changes the model before ``wrap``, such as torch.compile.
        sgd: further keyword arguments of torch.optim.SGD, such as ``fused``.
    """
    model = build_model("net", 0.5, torch.float32, 1)
    if weights is not None:
        nn.utils.convert_conv2d_weight_memory_format(model, weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, **sgd)
    wrapped = wrap(inner(model))
    turn = itertools.cycle(shards)

    def step() -> None:
        images, labels, size = next(turn)
        optimizer.zero_grad()
        loss = F.nll_loss(wrapped(images), labels, reduction="sum")
        (loss * (dist.get_world_size() / size)).backward()
        optimizer.step()

    return step


def gradients(shards: Shards, wrap: Callable[[nn.Module], nn.Module], passes: int) -> Tensor:
    """Return the gradients [n] of the last of ``passes`` backward passes. DDP reorders buckets after the first pass."""
    model = build_model("net", 0.0, torch.float32, 1)
    wrapped = wrap(model)
    for images, labels, size in shards[:1] * passes:
        model.zero_grad()
        loss = F.nll_loss(wrapped(images), labels, reduction="sum")
        (loss * (dist.get_world_size() / size)).backward()  # collective
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def check(shards: Shards) -> str:
    """Compare the hooks' gradients, and return the result as text.

    Raises:
        AssertionError: the gradients of a hook differ from the gradients of DDP by more than rounding errors, or in any
            bit from the gradients of another hook.
    """
    stock = gradients(shards, DistributedDataParallel, 1)
    sizes = (0.001, 0.03, 25)  # MB per bucket: a bucket contains one or two gradients, several, or all
    ways = [(size, passes) for size in sizes for passes in (1, 2, 3)]
    found = [
        gradients(shards, functools.partial(hooked, hook, bucket_cap_mb=size), passes)
        for hook in (by_rank_0, gather, exchange)
        for size, passes in ways
    ]
    assert all(torch.equal(found[0], each) for each in found), "the hooks' bits depend on the buckets"
    apart = ((found[0] - stock).abs().max() / stock.abs().max()).item()
    assert apart < 1e-6, f"{apart:.1e} of the largest gradient from DDP's"
    gathered = [torch.empty_like(found[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, found[0])  # collective
    assert all(torch.equal(found[0], each) for each in gathered), "ranks differ"
    own = [
        gradients(shards, functools.partial(DistributedDataParallel, bucket_cap_mb=size), passes)
        for size, passes in ways
    ]
    same = all(torch.equal(stock, each) for each in own)
    return (
        f"{len(found)} ways to add up in rank order: equal bits, {apart:.1e} of the largest gradient from DDP's, "
        f"whose own bits are {'equal' if same else 'not equal'} over buckets of {', '.join(map(str, sizes))} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=25, help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="also by torch.compile")
    parser.add_argument("--check", action="store_true", help="time nothing: are the hooks' gradients right?")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun must start this (see --help)")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    training, _ = load("mnist-5k", ROOT / "data", torch.device("cpu"), torch.float32)
    batches = GlobalBatches(len(training.labels), BATCH, 1, rank, world_size, drop_last=True)
    shards: Shards = [
        (*training.batch(batches.indices(step)), batches.size(step)) for step in range(batches.steps_per_epoch)
    ]
    if options.check:
        said = check(shards)
        if rank == 0:
            print(said, flush=True)
        dist.barrier()
        os._exit(0)  # gloo's threads may abort a normal exit
    ddp = DistributedDataParallel
    steps = {
        "plain": variant(shards, CONTIGUOUS),
        "channels last in the first convolution": variant(shards),
        "in all convolutions": variant(shards, CHANNELS_LAST),
        "the same, fused SGD": variant(shards, fused=True),
        "the same, foreach SGD": variant(shards, foreach=True),
        "the same, gradient_as_bucket_view": variant(shards, wrap=lambda m: ddp(m, gradient_as_bucket_view=True)),
        "the same, static_graph": variant(shards, wrap=lambda m: ddp(m, static_graph=True)),
        "the same, hook: gather, sum, broadcast (the app)": variant(shards, wrap=lambda m: hooked(by_rank_0, m)),
        "the same, hook: all-gather, sum": variant(shards, wrap=lambda m: hooked(gather, m)),
        "the same, hook: all-to-all, sum, all-gather": variant(shards, wrap=lambda m: hooked(exchange, m)),
        "the same, without DDP (ranks then differ)": variant(shards, wrap=lambda model: model),
    }
    if options.compile:
        compiled: Callable[[nn.Module], Any] = torch.compile
        steps["the same, torch.compile"] = variant(shards, inner=compiled)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            step()
            begun = time.perf_counter()
            for _ in range(AT_ONCE):
                step()
            taken[name].append(1000 * (time.perf_counter() - begun) / AT_ONCE)
    if rank == 0:
        print(f"{world_size} ranks, {torch.get_num_threads()} threads each, torch {torch.__version__}\n")
        print("| step | ms | times as fast as plain |\n|---|---|---|")
        for name, times in taken.items():
            ratio = statistics.median(plain / this for plain, this in zip(taken["plain"], times))
            print(f"| {name} | {statistics.median(times):.1f} (from {min(times):.1f}) | {ratio:.2f} |")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
