"""Train a convolutional network on CIFAR-10 with PyTorch DistributedDataParallel, by the step that people really take.

    bash scripts/run_cifar_ddp.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/cifar_ddp/train.py
    python apps/cifar_ddp/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/cifar_ddp/train.py   # one a machine

Each part of the step, from the schedule to batch normalisation, is a function of the step's number, of the sample or of
the global batch: the same at any number of ranks, and after a kill. README.md tells what the usual ways break.

Every rank runs this file. They talk at ten places, each marked: at the rendezvous, when they restore a checkpoint, when
DDP is built and when its sums are ordered, at each step for the statistics of the batch (norm.py) and the gradients
(in backward), at each log line for the loss, at each evaluation, before a checkpoint is saved, and at the end: do all
hold the same weights?
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ema
import norm
import numpy as np
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weights
from data import Split, count_of, each_has_some, feed, load
from model import build_model, compile_step
from options import parse
from samestep import env, log, schedules
from samestep.options import Options
from samestep.phases import Phases
from samestep.run import Run
from samestep.sharding import GlobalBatches, Rows, shard, step_seed
from samestep.watchdog import Watchdog
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

APP = Path(__file__).resolve().parent.name
EVALUATION_BATCH = 1000  # images at a time; of no influence on the result

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda step, steps: schedules.constant(step),
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "step": lambda step, steps: schedules.step_decay(step, (steps // 2, steps * 3 // 4)),
    "one-cycle": schedules.one_cycle,
}


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Norms and biases are not decayed: they only shift and scale."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0)


def learning_rate(options: Options, step: int, steps: int) -> float:
    """Of update ``step`` of ``steps``: a function of the step has nothing to save, and nothing to forget.

    A torch scheduler counts its calls instead, and is in no checkpoint unless it is put there.
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
    phases: Phases,
) -> Tensor:
    """One update with this rank's shard of a global batch, the next ``shards``; returns the shard's summed loss.

    The gradient must be the mean over the global batch's *samples*, although shards and micro-batches may differ in
    size. DDP averages over ranks, so each summed loss is scaled by world_size / rows.global_size, and micro-batches
    simply add up. A rank without samples takes part with a gradient of zeros.
    """
    losses = []
    optimizer.zero_grad()
    count = count_of(options, batches, step)
    for k in range(count):
        images, labels = next(shards)
        rows = batches.rows(step, (k, count))
        phases.end("input")
        # Before each: dropout draws for the whole global batch and takes these rows of it.
        ranks.generator(images.device).manual_seed(step_seed(options.seed, step))
        with nullcontext() if k == count - 1 else model.no_sync():  # the gradients are added up once
            with torch.autocast(images.device.type, torch.bfloat16, enabled=options.autocast == "bfloat16"):
                scores = model(images, rows)  # ranks talk: batch normalisation adds up its statistics
            loss = F.cross_entropy(
                scores.to(images.dtype), labels, reduction="sum", label_smoothing=options.label_smoothing
            )
            (loss * (dist.get_world_size() / rows.global_size)).backward()  # ranks talk: DDP adds up the gradients
        losses.append(loss.detach())
    if options.clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)  # of the global batch's, as DDP left them
    optimizer.step()
    return torch.stack(losses).sum()


@torch.inference_mode()
def evaluate(model: nn.Module, test: Split, dtype: torch.dtype, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank."""
    model.eval()
    first, last = shard(len(test.labels), dist.get_rank(), dist.get_world_size())
    sums = torch.zeros(3, dtype=torch.float64, device=test.labels.device)
    for begin in range(first, last, EVALUATION_BATCH):
        images, labels = test.batch(np.arange(begin, min(begin + EVALUATION_BATCH, last)), dtype)
        scores = model(images, Rows(0, len(images)))
        sums[0] += F.cross_entropy(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
        watchdog.beat()
    model.train()
    dist.all_reduce(sums)  # ranks talk
    loss_sum, correct, examples = sums.tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train, or go on training."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options, dtype).to(device)
    optimizer = build_optimizer(options, model)
    average = ema.Average(model, options.ema) if options.ema else None
    evaluated, run.evaluates = (average.model, "ema") if average else (model, "model")
    run.restore(ranks, partial(ema.load, model, optimizer, average))  # ranks talk: rank 0 reads, all load the same
    training, test = load(options.dataset, options.data_dir, device)
    n, size = len(training.labels), options.global_batch_size
    batches = GlobalBatches(n, size, options.seed, dist.get_rank(), dist.get_world_size())
    run.begin(batches, len(test.labels), options.model, device.type, ranks.facts(device))

    # Buffers are the same on all ranks, as their statistics are: they need not be broadcast before each pass.
    gpu = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=gpu, forward_sync_buffers=False)  # ranks talk
    ranks.order_sums(ddp, run.phases, *training.batch(np.arange(1), dtype))  # ranks talk
    ranks.time_phases(model, optimizer, run.phases)
    norm.time_waits(model, None if options.compile else run.phases)
    compiled = compile_step(ddp) if options.compile else ddp
    shards = feed(options, training, batches, range(run.start, run.stop), dtype)
    sum_since = torch.zeros((), dtype=torch.float64, device=device)  # this rank's summed loss since the last record
    for step in range(run.start, run.stop):
        run.phases.begin()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, options.epochs * batches.steps_per_epoch)
        # What torch 2.13 compiles fails on a rank without samples: then no rank uses it.
        trained = compiled if each_has_some(options, batches, step) else ddp
        loss_sum = train_step(options, trained, optimizer, shards, batches, step, run.phases)  # ranks talk
        if average:
            average.update(model, step)
        sum_since += loss_sum
        due = run.done(step)
        if due.talk:
            sums = torch.tensor([loss_sum, sum_since, *run.says()], dtype=torch.float64, device=device)
            ranks.add_up(sums)  # ranks talk
            due = run.heard(due, sums[2:].tolist())
        if due.log:
            sum_since.zero_()
            tested = evaluate(evaluated, test, dtype, run.watchdog) if due.test else {}  # ranks talk
            run.record(sums[0].item(), sums[1].item(), tested)
        if due.save:
            run.save(ranks, ema.groups(model, optimizer, average))  # ranks talk: they compare, then rank 0 writes

    shards.close()  # and a DataLoader's workers
    tested = run.tested or evaluate(evaluated, test, dtype, run.watchdog)  # ranks talk
    averaged = {"ema": weights.model_arrays(average.model)} if average else {}
    run.finish(ranks, weights.model_arrays(model), tested, averaged)  # ranks talk: all must hold the same weights


def main() -> None:
    options = parse(sys.argv[1:])
    run = Run(APP, options, env.detect(os.environ))
    device = ranks.choose_device(options.device, run.world)
    ranks.rendezvous(run.world, device, options.timeout)  # ranks talk
    train(run, options, device)
    dist.destroy_process_group()
    run.report("torch", torch.__version__, ranks.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
