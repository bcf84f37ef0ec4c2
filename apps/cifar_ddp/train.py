"""Train a convolutional network on CIFAR-10 with DistributedDataParallel, augmentation, schedules and accumulation.

    bash scripts/run_cifar_ddp.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/cifar_ddp/train.py
    python apps/cifar_ddp/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/cifar_ddp/train.py  # per machine

Schedule, augmentation, dropout and batch normalization depend on the step's number, the seed and the global batch, but
not on the ranks. The step is therefore the same at any world size, and after a restart.

Every rank runs this file. The comment "collective" marks each call in which a rank waits for the other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ema
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load, make_loader, no_empty_shards
from model import build_model
from options import parse
from samestep import env, log, schedules
from samestep.data import datasets
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, distributed, exact, reduction, updates
from samestep.torch.loaders import stop_workers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from virtual_ranks import VirtualRanks, check_sub_shards

EVAL_BATCH_SIZE = 250  # largest evaluation batch of a rank, in examples

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda step, steps: schedules.constant(step),
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "step": lambda step, steps: schedules.step_decay(step, (steps // 2, steps * 3 // 4)),
    "one-cycle": schedules.one_cycle,
}


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of --optimizer, without weight decay for norms and biases."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0)


def learning_rate(options: Options, step: int, steps: int) -> float:
    """Return the learning rate of update ``step``, from 0, of a run with ``steps`` updates.

    A function of the step needs no state in checkpoints. A torch scheduler counts its calls, so it needs state.
    """
    if step < options.warmup_steps:
        return float(options.lr * schedules.warmup(step, options.warmup_steps))
    done = step - options.warmup_steps
    total = max(1, steps - options.warmup_steps)
    factor = SCHEDULES[options.schedule](done, total)
    return float(options.lr * factor)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def summed_loss(options: Options, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16, enabled=options.autocast == "bfloat16"):
        scores = model(images)  # collective: batch norm reduces its statistics
    scores = scores.to(images.dtype)
    return F.cross_entropy(scores, labels, reduction="sum", label_smoothing=options.label_smoothing)


def compute_gradients(
    options: Options, model: DistributedDataParallel, sampler: GlobalBatchSampler, images: Tensor, labels: Tensor
) -> Tensor:
    """Accumulate the gradients of this rank's micro-batches, and return the summed loss of these micro-batches."""
    losses: list[Tensor] = []
    last = sampler.batches.num_micro_batches(sampler.step - 1) - 1
    for micro_images, micro_labels in sampler.micro_batches((images, labels)):
        is_last = len(losses) == last
        with nullcontext() if is_last else model.no_sync():  # DDP reduces only at the last micro-batch
            loss_sum = summed_loss(options, model, micro_images, micro_labels)
            # Scale to the mean over the global batch: shards and micro-batches may differ in size or be empty.
            sampler.scale(loss_sum).backward()  # collective: DDP averages the gradients
        losses.append(loss_sum.detach())
    return torch.stack(losses).sum()


def train_step(
    options: Options,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    sampler: GlobalBatchSampler,
    images: Tensor,
    labels: Tensor,
    compute_gradients: Callable[..., Tensor] = compute_gradients,
) -> Tensor:
    """Update once with this rank's shard of a global batch, and return the loss that ``compute_gradients`` returns."""
    optimizer.zero_grad()
    loss_sum = compute_gradients(options, model, sampler, images, labels)  # collective
    if options.clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)  # all ranks have equal gradients now
    optimizer.step()
    return loss_sum


@torch.inference_mode()
def evaluate(run: Run, model: nn.Module, loader: DataLoader, sampler: EvalSampler) -> dict[str, float]:
    """Return the test set's mean loss, accuracy and number of examples. Each example counts once, on one rank."""
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(sampler.num_blocks, 3, dtype=torch.float64, device=device)  # a row per block of the test set
    for block, (images, labels) in zip(sampler.own_blocks, loader):
        scores = model(images)
        sums[block, 0] = F.cross_entropy(scores, labels, reduction="sum")
        sums[block, 1] = (scores.argmax(dim=1) == labels).sum()
        sums[block, 2] = len(labels)
        run.monitor.beat()
    model.train()
    dist.all_reduce(sums)  # collective
    loss_sum, correct, examples = sums.sum(dim=0).tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train from the first step, or from the checkpoint if the run resumes."""
    rank = run.world.rank
    world_size = run.world.world_size
    dtype = getattr(torch, options.dtype)
    model = build_model(options, dtype).to(device)
    optimizer = build_optimizer(options, model)
    average: ema.Average | None = None
    eval_model = model
    names = ["model", "optimizer"]
    if options.ema:
        average = ema.Average(model, options.ema)
        eval_model = average.model
        names.append("ema")
    parts = Parts(
        load=partial(ema.load, model, optimizer, average),
        groups=partial(ema.groups, model, optimizer, average),
        names=names,
        watch=partial(updates.watch, dict(model.named_parameters())),
    )
    evaluated = "ema" if average else "model"
    run.restore(distributed, parts, evaluated)  # collective: rank 0 reads the checkpoint for all ranks

    # The global batches are the same at any world size. Each rank evaluates some blocks of the test set.
    train_set, test_set = load(options, device)
    sampler = GlobalBatchSampler(
        len(train_set),
        options.global_batch_size,
        rank=rank,
        world_size=world_size,
        seed=options.seed,
        virtual_ranks=options.virtual_ranks,
        accumulate=options.accumulate,
    )
    loader = make_loader(options, train_set, sampler)
    blocks = options.virtual_ranks or world_size
    eval_sampler = EvalSampler(len(test_set), EVAL_BATCH_SIZE, blocks=blocks, rank=rank, world_size=world_size)
    eval_loader = DataLoader(test_set, batch_sampler=eval_sampler)
    metadata = distributed.run_metadata(device)
    run.start(sampler.batches, len(test_set), options.model, device.type, metadata)

    # Make batch norm and dropout independent of the world size, and sums of gradients independent of restarts.
    if options.virtual_ranks:
        check_sub_shards(options, sampler)
    ddp = DistributedDataParallel(model, [device] if device.type == "cuda" else None)  # collective
    exact(ddp, sampler, timer=run.timer)
    reduction.time_phases(model, optimizer, run.timer)
    compute: Callable[..., Tensor] = compute_gradients
    if options.virtual_ranks:
        compute = VirtualRanks(ddp, sampler, summed_loss).compute_gradients
    compiled: Any = torch.compile(ddp, dynamic=True) if options.compile else ddp

    for images, labels in run.batches(loader):  # from the restored step to the run's last step
        images = images.to(device)
        labels = labels.to(device)
        set_learning_rate(optimizer, learning_rate(options, run.step, options.epochs * len(sampler)))
        # A module compiled by torch 2.13 fails on an empty shard. If a shard is empty, all ranks use the uncompiled
        # module.
        step_model = compiled if no_empty_shards(sampler, run.step) else ddp
        loss_sum = train_step(options, step_model, optimizer, sampler, images, labels, compute)  # collective
        if average:
            average.update(model, run.step)
        actions = run.after_step(loss_sum)  # counts the step and records progress, without communication
        if actions.sync:  # a log line, evaluation or checkpoint is due, or an agreed number of steps has passed
            actions = run.sync()  # collective: exchange losses, stop requests and phase times
        if actions.log:
            evaluation: dict[str, float] = {}
            if actions.evaluate:
                evaluation = evaluate(run, eval_model, eval_loader, eval_sampler)  # collective
            run.log_metrics(evaluation)
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: compare replicas, and write the checkpoint (rank 0)

    stop_workers()  # end the worker processes of --input loader
    metrics = run.eval_metrics or evaluate(run, eval_model, eval_loader, eval_sampler)  # collective
    run.finish(metrics)  # collective: compare replicas, and write the weights (rank 0)


def main() -> None:
    options = parse(sys.argv[1:])
    app = Path(__file__).resolve().parent.name
    run = Run(app, options, env.detect(), monitor=Watchdog(), resolve_dataset=datasets.resolve)
    device = distributed.choose_device(options.device, run.world)
    distributed.set_threads(options.threads)
    distributed.rendezvous(run.world, device, options.timeout)  # collective
    train(run, options, device)
    dist.destroy_process_group()
    run.report("torch", torch.__version__, distributed.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
