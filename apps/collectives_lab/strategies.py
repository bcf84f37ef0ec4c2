"""Ways to average gradients, or parameters, over ranks: each with its collectives in sight.

A rank's gradient is that of its summed loss times world_size / global batch, so that the mean over ranks is the mean
over the samples of the global batch, however they are spread. A strategy makes that mean and leaves it in ``.grad``.

    module = strategy.prepare(model)    # once; what forward is called on
    loss.backward()
    strategy.after_backward()           # gradients are averaged, and are the same on every rank
    optimizer.step()
    strategy.after_step(step)           # local SGD averages parameters here

One group, made once: a group for each step costs more than the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import talk
from samestep.sharding import shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# --- the mean of one long vector, in place, five ways --------------------------------------------------------------


def all_reduce(x: Tensor) -> None:
    """One collective."""
    with talk("all_reduce"):
        dist.all_reduce(x)
    x /= dist.get_world_size()


def reduce_broadcast(x: Tensor) -> None:
    """The sum goes to rank 0, and from there to all."""
    with talk("reduce"):
        dist.reduce(x, dst=0)
    x /= dist.get_world_size()
    with talk("broadcast"):
        dist.broadcast(x, src=0)


def gather_scatter(x: Tensor) -> None:
    """Rank 0 collects all vectors, averages them, and hands each rank the result: all traffic through one rank."""
    p = dist.get_world_size()
    if dist.get_rank() == 0:
        vectors = torch.empty(p, *x.shape, dtype=x.dtype, device=x.device)
        with talk("gather"):
            dist.gather(x, list(vectors), dst=0)
        mean = vectors.mean(dim=0)
        with talk("scatter"):
            dist.scatter(x, [mean] * p, src=0)
    else:
        with talk("gather"):
            dist.gather(x, dst=0)
        with talk("scatter"):
            dist.scatter(x, src=0)


def all_gather(x: Tensor) -> None:
    """Everyone collects all vectors and averages them itself, in rank order: p times the traffic, one step."""
    vectors = torch.empty(dist.get_world_size(), *x.shape, dtype=x.dtype, device=x.device)
    with talk("all_gather"):
        dist.all_gather(list(vectors), x)
    torch.mean(vectors, dim=0, out=x)


def ring(x: Tensor) -> None:
    """All-reduce as a ring of sends: x is cut into p pieces; each travels round once to be summed, once to be known.

    Reduce-scatter, then all-gather: 2(p-1) steps, in each of which every rank sends one piece. Patarasuk & Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    pieces = [x[slice(*shard(len(x), i, p))] for i in range(p)]
    received = torch.empty_like(pieces[0])  # the longest
    for step in range(p - 1):  # afterwards this rank holds the sum of piece rank + 1
        target = pieces[(rank - step - 1) % p]
        _exchange(pieces[(rank - step) % p], received[: len(target)])
        target += received[: len(target)]
    for step in range(p - 1):
        _exchange(pieces[(rank + 1 - step) % p], pieces[(rank - step) % p])
    x /= p


@dataclass
class Sent:
    """What this rank's hand-written collectives have sent; counted at every send."""

    bytes: int = 0
    messages: int = 0


sent = Sent()


def _exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the next rank of the ring while receiving from the one before."""
    rank, p = dist.get_rank(), dist.get_world_size()
    with talk("ring (isend and irecv)"):
        works = [dist.isend(outgoing, dst=(rank + 1) % p), dist.irecv(incoming, src=(rank - 1) % p)]
        for work in works:
            assert work is not None
            work.wait()
    sent.bytes += outgoing.numel() * outgoing.element_size()
    sent.messages += 1


@dataclass(frozen=True)
class Scheme:
    """A way to average, and what all ranks together send for n bytes on p ranks: ``bytes(n, p)``."""

    run: Callable[[Tensor], None]
    bytes: Callable[[float, int], float]


def gloo_reduce_bytes(n: float, p: int) -> float:
    """What all ranks together send in gloo's reduce of n bytes to rank 0.

    A ring in segments of at most 1 MiB, at least two for each rank, then the reduced pieces go to the root. The ring
    could stop after (p-1)/p of a round, and does where a rank has two segments; it always leaves out two segments a
    rank, so that with many it goes on for nearly a whole round. Source: gloo/reduce.cc.
    """
    if p == 1 or n == 0:
        return 0.0
    segment = min(math.ceil(n / (2 * p)), 2**20)
    segments = math.ceil(max(math.ceil(n / segment), 2 * p) / p) * p
    overhang = segments * segment - n  # beyond the end, never sent
    return p * n - max(0.0, 2 * p * segment - overhang) + max(0.0, n - segments / p * segment)


# gloo's other algorithms: all_reduce is a ring; broadcast is a binomial tree, in which everyone but the root receives
# once; gather and scatter are flat, the root's own part staying where it is; all_gather is a ring, in which every
# vector passes p - 1 links. Source: gloo/allreduce.cc, broadcast.cc, gather.cc, scatter.cc, allgather.cc.
SCHEMES = {
    "all_reduce": Scheme(all_reduce, lambda n, p: 2 * (p - 1) * n),
    "reduce_broadcast": Scheme(reduce_broadcast, lambda n, p: gloo_reduce_bytes(n, p) + (p - 1) * n),
    "gather_scatter": Scheme(gather_scatter, lambda n, p: 2 * (p - 1) * n),
    "all_gather": Scheme(all_gather, lambda n, p: p * (p - 1) * n),
    "ring": Scheme(ring, lambda n, p: 2 * (p - 1) * n),
}


def ring_messages(p: int) -> int:
    """Messages of all ranks together in one `ring`: p ranks, 2(p-1) steps."""
    return 2 * p * (p - 1)


# --- strategies ----------------------------------------------------------------------------------------------------


class Strategy:
    """What all have in common: the model's parameters."""

    backward = "backward"  # what backward is called in a timeline, and in an error
    synchronous = True  # the same weights on every rank after every step

    def prepare(self, model: nn.Module) -> nn.Module:
        self.parameters = list(model.parameters())
        return model

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def after_backward(self) -> None:
        """Average the gradients."""

    def after_step(self, step: int, last: bool) -> None:
        """Average the parameters; ``step`` counts from 0."""

    def bytes(self, n: float, p: int) -> float:
        """What all ranks together send in one step, for a model of n bytes."""
        return 2 * (p - 1) * n


class TorchDDP(Strategy):
    """torch's own: buckets, all_reduce while backward goes on, and the mean."""

    backward = "backward (with DDP's all_reduce)"

    def prepare(self, model: nn.Module) -> nn.Module:
        super().prepare(model)
        with talk("DDP's start"):
            return DistributedDataParallel(model)


class Overlap(Strategy):
    """The same by hand: a hook on each parameter, buckets filled from the last layer on, all_reduce beside backward.

    A bucket goes out when it is full and all before it have gone, so that every rank sends in the same order.
    """

    def __init__(self, bucket_bytes: int = 32 * 1024) -> None:
        self.bucket_bytes = bucket_bytes

    def prepare(self, model: nn.Module) -> nn.Module:
        super().prepare(model)
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(self.parameters):
            filled = sum(p.numel() * p.element_size() for p in self.buckets[-1])
            if self.buckets[-1] and filled + parameter.numel() * parameter.element_size() > self.bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self._start_over()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        with talk("broadcast of weights"):
            for parameter in self.parameters:
                dist.broadcast(parameter.data, src=0)
        return model

    def _start_over(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.under_way: list[tuple[Tensor, Any]] = []  # (flat gradient, its all_reduce), in the order of the buckets

    def _ready(self, parameter: Tensor) -> None:
        for index, bucket in enumerate(self.buckets):
            self.missing[index] -= any(parameter is each for each in bucket)
        while len(self.under_way) < len(self.buckets) and self.missing[len(self.under_way)] == 0:
            bucket = self.buckets[len(self.under_way)]
            flat = torch.cat([each.grad.flatten() for each in bucket if each.grad is not None])
            self.under_way.append((flat, dist.all_reduce(flat, async_op=True)))

    def after_backward(self) -> None:
        for bucket, (flat, work) in zip(self.buckets, self.under_way):
            with talk("all_reduce of a bucket"):
                work.wait()
            flat /= dist.get_world_size()
            _unflatten(flat, [each.grad for each in bucket if each.grad is not None])
        self._start_over()


class PerParameter(Strategy):
    """One all_reduce for each parameter: many small messages."""

    def after_backward(self) -> None:
        for gradient in self.gradients():
            all_reduce(gradient)


class Flat(Strategy):
    """All gradients as one vector, averaged by one of the schemes above."""

    def __init__(self, scheme: str) -> None:
        self.scheme = SCHEMES[scheme]

    def after_backward(self) -> None:
        flat = torch.cat([gradient.flatten() for gradient in self.gradients()])
        self.scheme.run(flat)
        _unflatten(flat, self.gradients())

    def bytes(self, n: float, p: int) -> float:
        return self.scheme.bytes(n, p)


class LocalSGD(Strategy):
    """Every rank steps by its own gradient; each ``every`` steps the parameters are averaged.

    With every = 1 it is the synchronous step: the mean of w - lr v_r is w - lr mean(v_r), momentum being linear too.
    Stich, "Local SGD converges fast and communicates little", ICLR 2019.
    """

    def __init__(self, every: int) -> None:
        self.every, self.synchronous = every, every == 1

    @torch.no_grad()
    def after_step(self, step: int, last: bool) -> None:
        if (step + 1) % self.every == 0 or last:
            flat = torch.cat([parameter.flatten() for parameter in self.parameters])
            all_reduce(flat)
            _unflatten(flat, self.parameters)

    def bytes(self, n: float, p: int) -> float:
        return 2 * (p - 1) * n / self.every


def _unflatten(flat: Tensor, into: list[Any]) -> None:
    for piece, target in zip(flat.split([each.numel() for each in into]), into):
        target.copy_(piece.view_as(target))


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": TorchDDP,
    "overlap": Overlap,
    "per_parameter": PerParameter,
    **{name: (lambda name=name: Flat(name)) for name in SCHEMES},  # type: ignore[misc]
    **{f"local_{every}": (lambda every=every: LocalSGD(every)) for every in (1, 4, 16)},  # type: ignore[misc]
}
