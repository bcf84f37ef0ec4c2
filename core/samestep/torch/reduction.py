"""Reduce gradients in an order that no restart changes, so that a resumed run ends with the same bits.

gloo's own all-reduce is a ring. From 3 ranks on, an element's place in its bucket decides the order of its sum, but DDP
rebuilds its buckets after the first backward pass. Small gradients therefore go to rank 0, which adds them up in the
order of ranks; for larger ones the buckets are rebuilt before training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep.sharding import BatchSlice, GlobalBatches
from samestep.step_timer import COMMUNICATION, COMPUTE, OPTIMIZER, StepTimer

if TYPE_CHECKING:
    from samestep.torch.virtual_ranks import GradientTree

GATHER_MAX_BYTES = 2**22  # that rank 0 gathers at a time


def use_gather(size: int) -> bool:
    """Return whether rank 0 sums tensors of ``size`` bytes: under gloo, while the number of messages costs most."""
    return dist.get_backend() == "gloo" and 1 < dist.get_world_size() <= GATHER_MAX_BYTES // max(1, size)


def ordered_all_reduce(tensor: Tensor) -> None:
    """Replace ``tensor`` by its sum over ranks, with the same bits on all of them.

    A ring passes 2 (p - 1) messages in turn at p ranks, however small they are. A small tensor goes to rank 0, which
    adds in the order of ranks, and back by a broadcast: 1 + log2(p) messages in turn.
    """
    if torch.compiler.is_compiling() or not use_gather(tensor.nbytes):  # a compiler cannot trace gather
        dist.all_reduce(tensor)  # collective
        return
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, gathered)  # collective
    for other in gathered[1:] if gathered else ():
        tensor += other
    dist.broadcast(tensor, src=0)  # collective


def fix_reduction_order(ddp: DistributedDataParallel, timer: StepTimer, images: Tensor, labels: Tensor) -> None:
    """Make DDP reduce gradients in an order that does not depend on when the process started.

    Every rank calls this once, after it built ``ddp`` and before the first step; ``images`` and ``labels`` are one
    sample. Weights and buffers stay as they are.
    """
    if use_gather(sum(parameter.nbytes for parameter in ddp.parameters())):
        # DDP refuses a hook whose annotations are strings; a lambda has none.
        ddp.register_comm_hook(timer, lambda timer, bucket: ddp_comm_hook(timer, bucket))
        return
    buffers = [buffer.clone() for buffer in ddp.buffers()]  # batch normalization updates its statistics
    for _ in range(2):  # DDP rebuilds its buckets in the second forward pass
        F.nll_loss(ddp(images, BatchSlice(0, 1)), labels).backward()  # collective
    ddp.zero_grad()
    for buffer, before in zip(ddp.buffers(), buffers):
        buffer.copy_(before)


def ddp_comm_hook(timer: StepTimer, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Return the mean over ranks of one bucket's gradients, as DDP expects of a communication hook.

    Its seconds count as communication, although the next bucket is computed meanwhile.
    """
    timer.mark(COMPUTE)
    gradients = bucket.buffer()
    ordered_all_reduce(gradients)  # collective
    timer.mark(COMMUNICATION)
    mean: Future[Tensor] = Future()
    mean.set_result(gradients.div_(dist.get_world_size()))
    return mean


def gradient_tree(
    model: nn.Module, batches: GlobalBatches, buffers: Sequence[Tensor] = (), *collectives: Callable[..., Tensor]
) -> GradientTree | None:
    """Return the tree that reduces the gradients of ``model`` instead of DDP; None without ``batches.virtual_ranks``.

    `GradientTree` explains the arguments.
    """
    if not batches.virtual_ranks:
        return None
    from samestep.torch.virtual_ranks import GradientTree  # other runs do not need it

    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False  # as in no_sync()
    return GradientTree(model, batches, buffers, *collectives)


def time_phases(model: nn.Module, optimizer: Optimizer, timer: StepTimer) -> None:
    """Let ``timer`` note when a step's last gradient is there, and when its update begins and ends.

    A gradient's hook runs before DDP's own, which may begin to reduce it; backward() returns when all are reduced.
    """
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: timer.mark(COMPUTE))
    optimizer.register_step_pre_hook(lambda *step: timer.mark(COMMUNICATION))
    optimizer.register_step_post_hook(lambda *step: timer.mark(OPTIMIZER))
