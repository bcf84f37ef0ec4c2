"""Average gradients or parameters over ranks by several strategies.

A rank differentiates its summed loss times world_size / global batch size. The mean of the gradients over ranks is
therefore the mean over the samples of the global batch, for any sizes of shards. Every strategy except local SGD stores
this mean in ``.grad``.

    module = strategy.prepare(model)           # once; call this module in the forward pass
    loss.backward()
    strategy.after_backward()                  # averages gradients, except in local SGD
    optimizer.step()
    strategy.after_step(step, is_last)         # local SGD averages parameters here

All strategies use the default process group, because the creation of a group needs more time than a step.
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
sent: Counter[str] = Counter()  # "bytes" and "messages" that this rank has sent by `exchange`


# --- the mean of one long vector, in place, five ways --------------------------------------------------------------


def all_reduce(x: Tensor) -> None:
    """Average ``x`` over ranks by one all_reduce."""
    with collective("all_reduce"):
        dist.all_reduce(x)
    x /= dist.get_world_size()


def reduce_broadcast(x: Tensor) -> None:
    """Reduce the sum to rank 0, and broadcast the mean from rank 0."""
    with collective("reduce"):
        dist.reduce(x, dst=0)
    x /= dist.get_world_size()
    with collective("broadcast"):
        dist.broadcast(x, src=0)


def gather_scatter(x: Tensor) -> None:
    """Gather all vectors on rank 0, and scatter their mean from rank 0. All traffic passes through rank 0."""
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
    """Gather all vectors on every rank. Each rank then averages the vectors in rank order."""
    vectors = x.new_empty(dist.get_world_size(), *x.shape)
    with collective("all_gather"):
        dist.all_gather(list(vectors), x)
    torch.mean(vectors, dim=0, out=x)


def ring(x: Tensor) -> None:
    """Average ``x`` over ranks by sends in a ring: first a reduce-scatter, then an all-gather.

    Every rank sends one of p pieces to the next rank in each of 2(p-1) steps. Source: Patarasuk & Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009.
    """
    rank = dist.get_rank()
    p = dist.get_world_size()
    pieces = [x[slice(*shard(len(x), i, p))] for i in range(p)]
    received = torch.empty_like(pieces[0])  # no piece is longer than piece 0
    for step in range(p - 1):  # after this loop, this rank has the sum of piece (rank + 1) % p
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
    """Send ``outgoing`` to the ring's next rank, and at the same time receive ``incoming`` from the previous rank."""
    to, source = neighbors()
    for work in (dist.isend(outgoing, dst=to), dist.irecv(incoming, src=source)):
        assert work is not None
        work.wait()
    sent.update(bytes=outgoing.nbytes, messages=1)


def neighbors() -> tuple[int, int]:
    """Return the next rank of the ring, to which this rank sends, and the previous rank, which sends to this rank."""
    rank = dist.get_rank()
    count = dist.get_world_size()
    return (rank + 1) % count, (rank - 1) % count


@dataclass(frozen=True)
class Scheme:
    """A function that averages one vector, and ``bytes(n, p)``, the bytes that p ranks send in total for n bytes."""

    run: Callable[[Tensor], None]
    bytes: Callable[[float, int], float]


def gloo_reduce_bytes(n: float, p: int) -> float:
    """Return the bytes that all ranks send in total in gloo's reduce of n bytes to rank 0.

    gloo uses a ring with segments of at most 1 MiB, and at least two segments per rank. Then the ranks send the
    reduced pieces to the root. The ring always omits two segments per rank. A ring of two segments per rank therefore
    stops after (p-1)/p of a round. A ring of many segments needs nearly a full round. Source: gloo/reduce.cc.
    """
    if p == 1 or n == 0:
        return 0.0
    segment = min(math.ceil(n / (2 * p)), 2**20)
    segments = math.ceil(max(math.ceil(n / segment), 2 * p) / p) * p
    overhang = segments * segment - n  # bytes beyond the end of the vector, which no rank sends
    left_out = max(0.0, 2 * p * segment - overhang)
    to_root = max(0.0, n - segments / p * segment)
    return p * n - left_out + to_root


def gloo_reduce_broadcast_bytes(n: float, p: int) -> float:
    """Return the bytes that all ranks send in total in gloo's reduce and broadcast of n bytes."""
    return gloo_reduce_bytes(n, p) + (p - 1) * n


def all_gather_bytes(n: float, p: int) -> float:
    """Return the bytes that all ranks send in total in gloo's all_gather of n bytes per rank."""
    return p * (p - 1) * n


def _twice_around(n: float, p: int) -> float:
    return 2 * (p - 1) * n


# In gloo, all_reduce is a ring. broadcast is a binomial tree, in which every rank except the root receives once. gather
# and scatter send directly between the root and each other rank. all_gather is a ring, in which every vector passes
# p - 1 links. Source: gloo/allreduce.cc, broadcast.cc, gather.cc, scatter.cc, allgather.cc.
SCHEMES = {
    "all_reduce": Scheme(all_reduce, _twice_around),
    "reduce_broadcast": Scheme(reduce_broadcast, gloo_reduce_broadcast_bytes),
    "gather_scatter": Scheme(gather_scatter, _twice_around),
    "all_gather": Scheme(all_gather, all_gather_bytes),
    "ring": Scheme(ring, _twice_around),
}


def ring_messages(p: int) -> int:
    """Return the number of messages that p ranks send in total in one `ring` of 2(p-1) steps."""
    return 2 * p * (p - 1)


# --- strategies ----------------------------------------------------------------------------------------------------


class Strategy:
    """The base class of all strategies. This class averages neither gradients nor parameters."""

    backward = "backward"  # name of the backward pass in timelines and errors
    synchronous = True  # whether all ranks have the same weights after every step
    every = 0  # number of steps between two averages of the parameters; 0 if gradients are averaged instead
    scheme = SCHEMES["all_reduce"]  # scheme that computes the number of sent bytes

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepare the model, and return the module that the forward pass must call."""
        self.parameters = list(model.parameters())
        return model

    def after_backward(self) -> None:
        """Average the gradients over ranks, if the strategy does so."""

    def after_step(self, step: int, is_last: bool) -> None:
        """Average the parameters over ranks, if the strategy does so. ``step`` counts from 0."""

    def bytes(self, n: float, p: int) -> float:
        """Return the bytes that p ranks send in total per step on average, for a model of n bytes."""
        return self.scheme.bytes(n, p) / (self.every or 1)


class TorchDDP(Strategy):
    """Average gradients by torch's DDP, which calls all_reduce on buckets during the backward pass."""

    backward = "backward (with DDP's all_reduce)"

    def prepare(self, model: nn.Module) -> nn.Module:
        with collective("DDP's start"):
            return DistributedDataParallel(model)


class Overlap(Strategy):
    """Average gradients like DDP, by hooks on parameters that call all_reduce on buckets during the backward pass.

    The first bucket has the last layers. A rank sends a bucket when all gradients of the bucket are ready and all
    earlier buckets are sent. All ranks therefore send buckets in the same order.
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
        self.ready = set[Tensor]()  # parameters whose gradient is computed
        self.pending: list[tuple[Tensor, Any]] = []  # (flat gradient, its all_reduce) of each bucket that was sent

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
    """Average gradients by the module `GradientAverage`, as programs did before torch's DDP supported CPUs."""

    backward = "backward (with an all_reduce of each dtype)"

    def prepare(self, model: nn.Module) -> nn.Module:
        return GradientAverage(model)


class GradientAverage(nn.Module):
    """A module that broadcasts its weights before the first forward pass, and averages gradients after backward.

    The hook of a backward pass's first gradient queues `all_reduce_gradients` for the end of the pass. Communication
    therefore does not overlap with computation. One all_reduce averages all gradients of a dtype.
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
        """Replace each ``.grad`` by its mean over ranks."""
        self.is_queued = False
        gradients = _gradients(self.module.parameters())
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            bucket = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = _flatten(bucket)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            _unflatten(flat, bucket)


class PerParameter(Strategy):
    """Average gradients by one all_reduce per parameter, which sends many small messages."""

    def after_backward(self) -> None:
        for gradient in _gradients(self.parameters):
            all_reduce(gradient)


class Flat(Strategy):
    """Average all gradients as one vector by a scheme of SCHEMES."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def after_backward(self) -> None:
        flat = _flatten(_gradients(self.parameters))
        self.scheme.run(flat)
        _unflatten(flat, _gradients(self.parameters))


class LocalSGD(Strategy):
    """Update by this rank's gradients, and average the parameters after every ``every`` steps and the last step.

    The update is synchronous if every = 1: the mean of w - lr v_r is w - lr mean(v_r), and momentum is linear too.
    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019.
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
