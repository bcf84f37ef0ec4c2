"""Average gradients, or parameters, over ranks in many ways, each with its collectives in sight.

A rank differentiates its summed loss times world_size / global batch size. The mean over ranks is therefore the
mean over the samples of the global batch, however they are spread. A strategy leaves that mean in ``.grad``.

    module = strategy.prepare(model)           # once; call this module in the forward pass
    loss.backward()
    strategy.after_backward()                  # gradients are averaged, and are the same on every rank
    optimizer.step()
    strategy.after_step(step, is_last)         # local SGD averages parameters here

All of them use the default group, because to make a group for each step would cost more than the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed import collective
from samestep.sharding import shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 32 * 1024
sent: Counter[str] = Counter()  # "bytes" and "messages" that this rank's hand-written collectives have sent


# --- the mean of one long vector, in place, five ways --------------------------------------------------------------


def all_reduce(x: Tensor) -> None:
    """Average by one collective."""
    with collective("all_reduce"):
        dist.all_reduce(x)
    x /= dist.get_world_size()


def reduce_broadcast(x: Tensor) -> None:
    """Send the sum to rank 0, and the mean from there to all."""
    with collective("reduce"):
        dist.reduce(x, dst=0)
    x /= dist.get_world_size()
    with collective("broadcast"):
        dist.broadcast(x, src=0)


def gather_scatter(x: Tensor) -> None:
    """Collect all vectors on rank 0, which averages them and hands each rank the mean: one rank has all the traffic."""
    p = dist.get_world_size()
    vectors: list[Tensor] | None = None
    means: list[Tensor] | None = None
    if dist.get_rank() == 0:
        whole = x.new_empty(p, *x.shape)
        vectors = list(whole)
    with collective("gather"):
        dist.gather(x, vectors, dst=0)
    if dist.get_rank() == 0:
        means = [whole.mean(dim=0)] * p
    with collective("scatter"):
        dist.scatter(x, means, src=0)


def all_gather(x: Tensor) -> None:
    """Collect all vectors on every rank, which averages them in rank order: p times the traffic, one step."""
    vectors = x.new_empty(dist.get_world_size(), *x.shape)
    with collective("all_gather"):
        dist.all_gather(list(vectors), x)
    torch.mean(vectors, dim=0, out=x)


def ring(x: Tensor) -> None:
    """All-reduce by a ring of sends: each of p pieces goes round twice, first as a sum, then as a result.

    Reduce-scatter, then all-gather: in each of 2(p-1) steps, every rank sends one piece. Patarasuk & Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009.
    """
    rank = dist.get_rank()
    p = dist.get_world_size()
    pieces = [x[slice(*shard(len(x), i, p))] for i in range(p)]
    received = torch.empty_like(pieces[0])  # the longest
    for step in range(p - 1):  # afterwards this rank has the sum of piece rank + 1
        outgoing = pieces[(rank - step) % p]
        target = pieces[(rank - step - 1) % p]
        incoming = received[: len(target)]
        with collective("ring (isend and irecv)"):
            exchange(outgoing, incoming)
        target += incoming
    for step in range(p - 1):
        outgoing = pieces[(rank + 1 - step) % p]
        incoming = pieces[(rank - step) % p]
        with collective("ring (isend and irecv)"):
            exchange(outgoing, incoming)
    x /= p


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the next rank of the ring, and receive from the one before at the same time."""
    to, source = neighbors()
    for work in (dist.isend(outgoing, dst=to), dist.irecv(incoming, src=source)):
        assert work is not None
        work.wait()
    sent.update(bytes=outgoing.nbytes, messages=1)


def neighbors() -> tuple[int, int]:
    """Return the ranks that this rank sends to, and receives from, in a ring."""
    rank = dist.get_rank()
    count = dist.get_world_size()
    return (rank + 1) % count, (rank - 1) % count


@dataclass(frozen=True)
class Scheme:
    """Hold a way to average, and ``bytes(n, p)``: what all ranks together send for n bytes on p ranks."""

    run: Callable[[Tensor], None]
    bytes: Callable[[float, int], float]


def gloo_reduce_bytes(n: float, p: int) -> float:
    """Return what all ranks together send in gloo's reduce of n bytes to rank 0.

    A ring in segments of at most 1 MiB, at least two for each rank; then the reduced pieces go to the root. The ring
    could stop after (p-1)/p of a round, and does if a rank has two segments. It always leaves out two segments a
    rank. With many segments, it therefore takes nearly a whole round. Source: gloo/reduce.cc.
    """
    if p == 1 or n == 0:
        return 0.0
    segment = min(math.ceil(n / (2 * p)), 2**20)
    segments = math.ceil(max(math.ceil(n / segment), 2 * p) / p) * p
    overhang = segments * segment - n  # beyond the end, never sent
    left_out = max(0.0, 2 * p * segment - overhang)
    to_root = max(0.0, n - segments / p * segment)
    return p * n - left_out + to_root


def gloo_reduce_broadcast_bytes(n: float, p: int) -> float:
    """Return what all ranks together send in gloo's reduce and broadcast of n bytes."""
    return gloo_reduce_bytes(n, p) + (p - 1) * n


def all_gather_bytes(n: float, p: int) -> float:
    """Return what all ranks together send in gloo's all_gather of n bytes from each."""
    return p * (p - 1) * n


def _twice_around(n: float, p: int) -> float:
    return 2 * (p - 1) * n


# gloo's other algorithms: all_reduce is a ring. In broadcast, a binomial tree, every rank except the root receives
# once. Gather and scatter are flat, and the root keeps its own part. In all_gather, a ring, every vector passes p - 1
# links. Source: gloo/allreduce.cc, broadcast.cc, gather.cc, scatter.cc, allgather.cc.
SCHEMES = {
    "all_reduce": Scheme(all_reduce, _twice_around),
    "reduce_broadcast": Scheme(reduce_broadcast, gloo_reduce_broadcast_bytes),
    "gather_scatter": Scheme(gather_scatter, _twice_around),
    "all_gather": Scheme(all_gather, all_gather_bytes),
    "ring": Scheme(ring, _twice_around),
}


def ring_messages(p: int) -> int:
    """Return how many messages all p ranks together send in one `ring`: 2(p-1) steps."""
    return 2 * p * (p - 1)


# --- strategies ----------------------------------------------------------------------------------------------------


class Strategy:
    """Average nothing, and know the model's parameters: the base of all strategies."""

    backward = "backward"  # what timelines and errors call the backward pass
    synchronous = True  # the same weights on every rank after every step
    every = 0  # steps between two averages of the parameters; 0: gradients are averaged instead
    scheme = SCHEMES["all_reduce"]  # how one vector is averaged

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return what the forward pass must call."""
        self.parameters = list(model.parameters())
        return model

    def after_backward(self) -> None:
        """Average the gradients."""

    def after_step(self, step: int, is_last: bool) -> None:
        """Average the parameters; ``step`` counts from 0."""

    def bytes(self, n: float, p: int) -> float:
        """Return what all ranks together send in one step, for a model of n bytes."""
        return self.scheme.bytes(n, p) / (self.every or 1)


class TorchDDP(Strategy):
    """Use torch's own: buckets, all_reduce during the backward pass, and the mean."""

    backward = "backward (with DDP's all_reduce)"

    def prepare(self, model: nn.Module) -> nn.Module:
        with collective("DDP's start"):
            return DistributedDataParallel(model)


class Overlap(Strategy):
    """Do the same by hand: a hook on each parameter, buckets from the last layer on, all_reduce during backward.

    A bucket is sent when it is full and all before it have been sent, so that every rank sends in the same order.
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        super().prepare(model)
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(self.parameters):
            used = sum(each.nbytes for each in self.buckets[-1])
            if used and used + parameter.nbytes > BUCKET_BYTES:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self._reset()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._send_full_buckets)
        _broadcast(self.parameters)
        return model

    def _reset(self) -> None:
        self.ready = set[Tensor]()  # parameters whose gradient is there
        self.pending: list[tuple[Tensor, Any]] = []  # (flat gradient, its all_reduce), in the order of the buckets

    def _send_full_buckets(self, parameter: Tensor) -> None:
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.pending) :]:
            if not self.ready.issuperset(bucket):
                return
            flat = _flatten(_gradients(bucket))
            self.pending.append((flat, dist.all_reduce(flat, async_op=True)))

    def after_backward(self) -> None:
        for bucket, (flat, work) in zip(self.buckets, self.pending):
            with collective("all_reduce of a bucket"):
                work.wait()
            flat /= dist.get_world_size()
            _unflatten(flat, _gradients(bucket))
        self._reset()


class Module(Strategy):
    """Wrap the model in `GradientAverage`, as programs did before torch had a DDP for CPUs."""

    backward = "backward (with an all_reduce of each dtype)"

    def prepare(self, model: nn.Module) -> nn.Module:
        return GradientAverage(model)


class GradientAverage(nn.Module):
    """Broadcast the weights at the first forward pass, and average all gradients when a backward pass ends.

    The first gradient of a backward pass has the autograd engine call `all_reduce_gradients` at the end of the pass.
    So nothing overlaps, and the gradients of each dtype go as one vector.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_first = True
        self.is_queued = False
        for parameter in module.parameters():
            parameter.register_hook(self._queue)

    def forward(self, *inputs: Any) -> Any:
        if self.is_first:
            self.is_first = False
            _broadcast(self.module.parameters())
        return self.module(*inputs)

    def _queue(self, gradient: Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.all_reduce_gradients)

    def all_reduce_gradients(self) -> None:
        """Leave the mean over ranks in ``.grad``."""
        self.is_queued = False
        gradients = _gradients(self.module.parameters())
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            bucket = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = _flatten(bucket)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            _unflatten(flat, bucket)


class PerParameter(Strategy):
    """Call all_reduce once for each parameter: many small messages."""

    def after_backward(self) -> None:
        for gradient in _gradients(self.parameters):
            all_reduce(gradient)


class Flat(Strategy):
    """Average all gradients as one vector, by one of the schemes above."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def after_backward(self) -> None:
        flat = _flatten(_gradients(self.parameters))
        self.scheme.run(flat)
        _unflatten(flat, _gradients(self.parameters))


class LocalSGD(Strategy):
    """Step by the rank's own gradient, and average the parameters each ``every`` steps.

    With every = 1 it is the synchronous step: the mean of w - lr v_r is w - lr mean(v_r), and momentum is linear, too.
    Stich, "Local SGD converges fast and communicates little", ICLR 2019.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.synchronous = every == 1

    @torch.no_grad()
    def after_step(self, step: int, is_last: bool) -> None:
        if (step + 1) % self.every == 0 or is_last:
            flat = _flatten(self.parameters)
            all_reduce(flat)
            _unflatten(flat, self.parameters)


def _broadcast(parameters: Iterable[Tensor]) -> None:
    with collective("broadcast of weights"):
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _unflatten(flat: Tensor, into: Sequence[Tensor]) -> None:
    pieces = flat.split([each.numel() for each in into])
    for piece, target in zip(pieces, into):
        target.copy_(piece.view_as(target))


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": TorchDDP,
    "overlap": Overlap,
    "module": Module,
    "per_parameter": PerParameter,
    **{name: partial(Flat, scheme) for name, scheme in SCHEMES.items()},
    **{f"local_{every}": partial(LocalSGD, every) for every in (1, 4, 16)},
}
