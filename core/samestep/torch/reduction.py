"""Reduce gradients in an order that a restart does not change, so that a resumed run ends with the same bits.

gloo's all-reduce is a ring. With 3 or more ranks, the order of an element's sum depends on its place in the bucket. But
DDP rebuilds its buckets after the first backward pass. Therefore rank 0 sums the gradients of small models in rank
order. For larger models, each parameter's gradient has its own all-reduce.
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
from samestep.torch.ranks import Group, has_group
from samestep.torch.ranks import ordered_all_reduce as ordered_all_reduce
from samestep.torch.ranks import use_gather as use_gather

if TYPE_CHECKING:
    from samestep.torch.virtual_ranks import GradientTree


def register_ordered_hook(ddp: DistributedDataParallel, timer: StepTimer | None = None) -> None:
    """Register a DDP hook that reduces gradients in an order which does not depend on DDP's buckets.

    With gloo, rank 0 sums the gradients of small models in rank order. Otherwise, each parameter's gradient
    has its own all-reduce.

    Args:
        ddp: the model, before its first forward pass. Call this function on all ranks.
        timer: timer that counts the hook as communication, although a GPU may compute other gradients meanwhile.
    """
    group = ddp.process_group
    gathers = use_gather(sum(parameter.nbytes for parameter in ddp.parameters()), group)
    reduce = _add_on_rank_0 if gathers else _reduce_by_parameter
    # DDP rejects a hook whose annotations are strings, and a lambda has no annotations.
    ddp.register_comm_hook(timer, lambda timer, bucket: _reduce_bucket(timer, bucket, reduce, group))


def _reduce_bucket(
    timer: StepTimer | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    reduce: Callable[[dist.GradBucket, Group], None],  # type: ignore[name-defined]
    group: Group,
) -> Future[Tensor]:
    """Return a future with the mean over ranks of one bucket's gradients, as DDP requires."""
    if timer:
        timer.mark(COMPUTE)
    if bucket.buffer().is_sparse:  # one parameter's gradient, which gloo adds in rank order
        dist.all_reduce(bucket.buffer(), group=group)  # collective
    else:
        reduce(bucket, group)  # collective
    if timer:
        timer.mark(COMMUNICATION)
    mean: Future[Tensor] = Future()
    mean.set_result(bucket.buffer().div_(dist.get_world_size(group)))
    return mean


def _add_on_rank_0(bucket: dist.GradBucket, group: Group) -> None:  # type: ignore[name-defined]
    ordered_all_reduce(bucket.buffer(), group)  # collective


def _reduce_by_parameter(bucket: dist.GradBucket, group: Group) -> None:  # type: ignore[name-defined]
    works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in bucket.gradients()]  # collective
    for work in works:
        work.wait()


def gradient_tree(
    model: nn.Module, batches: GlobalBatches, buffers: Sequence[Tensor] = (), *collectives: Callable[..., Tensor]
) -> GradientTree | None:
    """Return the tree that reduces the gradients of ``model`` instead of DDP; None without ``batches.virtual_ranks``.

    Args:
        model: the model whose gradients are reduced.
        batches: the run's global batches.
        buffers: tensors that each micro-batch overwrites, such as statistics of a norm. The tree also sums them.
        *collectives: the framework's all_to_all and all_gather; by default the collectives of torch.

    Raises:
        ValueError: ``batches`` have another number of ranks than torch's process group.
    """
    if not batches.virtual_ranks:
        return None
    world_size = dist.get_world_size() if has_group() else 1
    if not collectives and batches.world_size != world_size:
        raise ValueError(
            f"the batches are for {batches.world_size} ranks, and the process group has {world_size}: create the "
            "sampler after torch.distributed.init_process_group, without group="
        )
    from samestep.torch.virtual_ranks import GradientTree  # runs without virtual ranks do not need this module

    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False  # has the effect of no_sync()
        model.broadcast_buffers = False  # ranks have different numbers of forward passes, or none
    return GradientTree(model, batches, buffers, *collectives)


def time_phases(model: nn.Module, optimizer: Optimizer, timer: StepTimer) -> None:
    """Register hooks that mark a step's last gradient, and the beginning and end of its update, in ``timer``.

    A gradient's hook runs before DDP's hook, which may start a reduction. backward() returns after all reductions.

    Args:
        model: the model whose gradients are timed.
        optimizer: the optimizer whose updates are timed.
        timer: the timer to mark.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: timer.mark(COMPUTE))
    optimizer.register_step_pre_hook(lambda *step: timer.mark(COMMUNICATION))
    optimizer.register_step_post_hook(lambda *step: timer.mark(OPTIMIZER))
