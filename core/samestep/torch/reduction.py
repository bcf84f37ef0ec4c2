"""Reduce gradients in an order that no restart changes, so that a resumed run ends with the same bits.

gloo's own all-reduce is a ring. From 3 ranks on, an element's place in its bucket decides the order of its sum, but DDP
rebuilds its buckets after the first backward pass. Small gradients therefore go to rank 0, which adds them up in the
order of ranks; larger ones are reduced by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep.sharding import GlobalBatches
from samestep.step_timer import COMMUNICATION, COMPUTE, OPTIMIZER, StepTimer
from samestep.torch.ranks import ordered_all_reduce as ordered_all_reduce
from samestep.torch.ranks import use_gather as use_gather

if TYPE_CHECKING:
    from samestep.torch.virtual_ranks import GradientTree


def register_ordered_hook(ddp: DistributedDataParallel, timer: StepTimer | None = None) -> None:
    """Let DDP reduce gradients in an order that does not depend on its buckets, which it rebuilds after the first step.

    Small models are summed on rank 0 in the order of ranks, and larger ones by parameter. The choice depends on the
    size of the model only.

    Args:
        ddp: the model, on all ranks, before its first forward pass.
        timer: counts the time as communication, although the next bucket is computed meanwhile.
    """
    gathers = use_gather(sum(parameter.nbytes for parameter in ddp.parameters()))
    reduce = _add_on_rank_0 if gathers else _reduce_by_parameter
    # DDP refuses a hook whose annotations are strings; a lambda has none.
    ddp.register_comm_hook(timer, lambda timer, bucket: _reduce_bucket(timer, bucket, reduce))


def _reduce_bucket(
    timer: StepTimer | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    reduce: Callable[[dist.GradBucket], None],  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Return the mean over ranks of one bucket's gradients, as DDP expects of a communication hook."""
    if timer:
        timer.mark(COMPUTE)
    reduce(bucket)  # collective
    if timer:
        timer.mark(COMMUNICATION)
    mean: Future[Tensor] = Future()
    mean.set_result(bucket.buffer().div_(dist.get_world_size()))
    return mean


def _add_on_rank_0(bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
    ordered_all_reduce(bucket.buffer())  # collective


def _reduce_by_parameter(bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
    works = [dist.all_reduce(gradient, async_op=True) for gradient in bucket.gradients()]  # collective
    for work in works:
        work.wait()


def gradient_tree(
    model: nn.Module, batches: GlobalBatches, buffers: Sequence[Tensor] = (), *collectives: Callable[..., Tensor]
) -> GradientTree | None:
    """Return the tree that reduces the gradients of ``model`` instead of DDP; None without ``batches.virtual_ranks``.

    Args:
        model: the model whose gradients are reduced.
        batches: the run's global batches.
        buffers: tensors that each micro-batch overwrites, such as statistics of a norm; they are summed too.
        *collectives: the framework's all_to_all and all_gather; torch's by default.
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

    Args:
        model: the model whose gradients are timed.
        optimizer: its updates are timed.
        timer: notes the times.
    """
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: timer.mark(COMPUTE))
    optimizer.register_step_pre_hook(lambda *step: timer.mark(COMMUNICATION))
    optimizer.register_step_post_hook(lambda *step: timer.mark(OPTIMIZER))
