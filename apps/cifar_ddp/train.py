"""Train a convolutional network on CIFAR-10 with PyTorch DistributedDataParallel, with all that a step usually has.

    bash scripts/run_cifar_ddp.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/cifar_ddp/train.py
    python apps/cifar_ddp/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/cifar_ddp/train.py  # per machine

Each part of the step, from the schedule to batch normalization, depends only on the step's number, the sample or the
global batch. So it is the same at any number of ranks, and after a kill. README.md shows what the usual ways break.

Every rank runs this file. The comment "collective" marks each call in which a rank waits for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ema
import norm
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Split, batches_of, load, no_empty_shards
from model import build_model, compile_step
from options import parse
from samestep import env, log, schedules
from samestep.data import datasets
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import BatchSlice, GlobalBatches, eval_batches, shard, step_seed
from samestep.step_timer import INPUT, StepTimer
from samestep.torch import distributed, reduction
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from samestep.torch.virtual_ranks import GradientTree

EVAL_BATCH_SIZE = 250  # at most; ranks take whole batches, which are the same at any number of ranks

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda step, steps: schedules.constant(step),
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "step": lambda step, steps: schedules.step_decay(step, (steps // 2, steps * 3 // 4)),
    "one-cycle": schedules.one_cycle,
}


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer. Norms and biases are not decayed: they only shift and scale."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0)


def learning_rate(options: Options, step: int, steps: int) -> float:
    """Return the rate of update ``step`` of ``steps``. A function of the step has nothing to save or to forget.

    A torch scheduler counts its calls instead, and no checkpoint has it unless you put it there.
    """
    if step < options.warmup_steps:
        return float(options.lr * schedules.warmup(step, options.warmup_steps))
    factor = SCHEDULES[options.schedule](step - options.warmup_steps, max(1, steps - options.warmup_steps))
    return float(options.lr * factor)


def train_step(
    options: Options,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    shards: Iterator[tuple[Tensor, Tensor]],
    batches: GlobalBatches,
    step: int,
    timer: StepTimer,
    tree: GradientTree | None = None,
) -> Tensor:
    """Update once with this rank's shard of a global batch, the next ``shards``; return the shard's summed loss.

    The gradient must be the mean over the global batch: DDP divides by world_size, and shards and micro-batches may
    differ in size or be empty. Micro-batches add up; a ``tree`` adds them without DDP (--virtual-ranks).
    """
    losses = []
    optimizer.zero_grad()
    micro_batches = batches.micro_batches(step)
    scale = 1 if tree else dist.get_world_size()  # undoes DDP's division
    for micro_batch in micro_batches:
        images, labels = next(shards)
        rows = batches.rows(step, micro_batch)
        timer.mark(INPUT)
        # Before each micro-batch: dropout draws for the whole global batch and takes these rows of it.
        distributed.generator(images.device).manual_seed(step_seed(options.seed, step))
        with nullcontext() if micro_batch == micro_batches[-1] else model.no_sync():  # the gradients are reduced once
            with torch.autocast(images.device.type, torch.bfloat16, enabled=options.autocast == "bfloat16"):
                scores = model(images, rows)  # collective: batch normalization reduces its statistics
            loss = F.cross_entropy(
                scores.to(images.dtype), labels, reduction="sum", label_smoothing=options.label_smoothing
            )
            (loss * (scale / rows.global_size)).backward()  # collective: DDP averages the gradients
        losses.append(loss.detach())
        if tree:
            tree.add(micro_batch, loss)
    if tree:
        losses = [tree.all_reduce(step)]  # collective
        norm.update_running(model)
    if options.clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)  # of the global batch's, after DDP reduced them
    optimizer.step()
    return torch.stack(losses).sum()


@torch.inference_mode()
def evaluate(run: Run, model: nn.Module, test_set: Split, dtype: torch.dtype) -> dict[str, float]:
    """Return loss and accuracy over the whole test set. Exactly one rank counts each example, once."""
    model.eval()
    batches = eval_batches(len(test_set.labels), EVAL_BATCH_SIZE, run.options.virtual_ranks or run.world.world_size)
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device=test_set.labels.device)  # a row per batch
    for k in range(*shard(len(batches), run.world.rank, run.world.world_size)):
        images, labels = test_set.batch(batches[k], dtype)
        scores = model(images, BatchSlice(0, len(images)))
        sums[k, 0] = F.cross_entropy(scores, labels, reduction="sum")
        sums[k, 1] = (scores.argmax(dim=1) == labels).sum()
        sums[k, 2] = len(labels)
        run.monitor.beat()
    model.train()
    dist.all_reduce(sums)  # collective
    loss_sum, correct, examples = sums.sum(dim=0).tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train from the first step, or from the checkpoint that the run resumes."""
    dtype, rank, world_size = getattr(torch, options.dtype), run.world.rank, run.world.world_size
    model = build_model(options, dtype).to(device)
    optimizer = build_optimizer(options, model)
    average = ema.Average(model, options.ema) if options.ema else None
    eval_model, evaluated = (average.model, "ema") if average else (model, "model")
    parts = Parts(
        load=partial(ema.load, model, optimizer, average),
        groups=partial(ema.groups, model, optimizer, average),
        names=("model", "optimizer", "ema") if average else ("model", "optimizer"),
    )
    run.restore(distributed, parts, evaluated)  # collective: rank 0 reads
    train_set, test_set = load(options.dataset, options.data_dir, device)
    cut = rank, world_size, options.virtual_ranks, options.accumulate
    batches = GlobalBatches(len(train_set.labels), options.global_batch_size, options.seed, *cut)
    run.start(batches, len(test_set.labels), options.model, device.type, distributed.run_metadata(device))

    device_ids = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids)  # collective
    # Buffers are the same on all ranks, as their statistics are: DDP need not broadcast them before each pass. The
    # argument for this has two names, broadcast_buffers up to torch 2.11; the attribute has one.
    ddp.broadcast_buffers = False
    reduction.fix_reduction_order(ddp, run.timer, *train_set.batch(np.arange(1), dtype))  # collective
    sums = norm.separate(model, batches) if options.virtual_ranks else ()
    tree = reduction.gradient_tree(ddp, batches, sums)  # with --virtual-ranks, instead of DDP's own reduction
    reduction.time_phases(model, optimizer, run.timer)
    norm.time_communication(model, None if options.compile else run.timer)
    compiled = compile_step(ddp) if options.compile else ddp
    shards = batches_of(options, train_set, batches, range(run.first_step, run.last_step), dtype)
    for step in range(run.first_step, run.last_step):
        with run.timer.phase(INPUT):  # train_step marks the rest
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step, options.epochs * batches.steps_per_epoch)
        # A module compiled by torch 2.13 fails on a rank without samples. All ranks then use the plain one.
        step_model = compiled if no_empty_shards(batches, step) else ddp
        loss = train_step(options, step_model, optimizer, shards, batches, step, run.timer, tree)  # collective
        if average:
            average.update(model, step)
        actions = run.after_step(loss)  # counts, and beats for the watchdog; no communication
        if actions.sync:  # a log line, an evaluation, a checkpoint, or too long since the last one
            actions = run.sync()  # collective: losses, stop requests, phase times
        if actions.log:
            run.log_metrics(evaluate(run, eval_model, test_set, dtype) if actions.evaluate else {})  # collective
        if actions.save:  # also if a rank was asked to stop: then this raises Stopped
            run.save()  # collective: compare replicas; rank 0 writes

    shards.close()  # and a DataLoader's workers
    metrics = run.eval_metrics or evaluate(run, eval_model, test_set, dtype)  # collective
    run.finish(metrics)  # collective: compare replicas; rank 0 writes


def main() -> None:
    options = parse(sys.argv[1:])
    run = Run(Path(__file__).resolve().parent.name, options, env.detect(), Watchdog(), datasets.resolve)
    device = distributed.choose_device(options.device, run.world)
    distributed.set_threads(options.threads)
    distributed.rendezvous(run.world, device, options.timeout)  # collective
    train(run, options, device)
    dist.destroy_process_group()
    run.report("torch", torch.__version__, distributed.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
