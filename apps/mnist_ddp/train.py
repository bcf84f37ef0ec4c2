"""Train a small CNN on MNIST with PyTorch DistributedDataParallel.

    bash scripts/run_mnist_ddp.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/mnist_ddp/train.py
    python apps/mnist_ddp/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/mnist_ddp/train.py  # per machine

Every rank runs this file. The comment "collective" marks each call in which a rank waits for the others.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Split, load
from loader import choose_input
from model import build_model
from options import parse
from samestep import env, log
from samestep.data import datasets
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import BatchSlice, GlobalBatches, eval_batches, shard, step_seed
from samestep.torch import distributed, reduction, weights
from torch import nn

EVAL_BATCH_SIZE = 250  # at most; ranks take whole batches, which are the same at any number of ranks


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


@torch.inference_mode()
def evaluate(run: Run, model: nn.Module, test_set: Split, dtype: torch.dtype) -> dict[str, float]:
    """Return loss and accuracy over the whole test set. Exactly one rank counts each example, once."""
    model.eval()
    batches = eval_batches(len(test_set.labels), EVAL_BATCH_SIZE, run.options.virtual_ranks or run.world.world_size)
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device=test_set.labels.device)  # a row per batch
    for k in range(*shard(len(batches), run.world.rank, run.world.world_size)):
        images, labels = test_set.batch(batches[k], dtype)
        scores = model(images, BatchSlice(0, len(images)))
        sums[k, 0] = F.nll_loss(scores, labels, reduction="sum")
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
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    parts = Parts(load=partial(weights.load, model, optimizer), groups=partial(weights.groups, model, optimizer))
    run.restore(distributed, parts)  # collective: rank 0 reads
    train_set, test_set = load(options.dataset, options.data_dir, device)
    cut = rank, world_size, options.virtual_ranks
    batches = GlobalBatches(len(train_set.labels), options.global_batch_size, options.seed, *cut)
    run.start(batches, len(test_set.labels), options.model, device.type, distributed.run_metadata(device))

    ddp = nn.parallel.DistributedDataParallel(model, [device] if device.type == "cuda" else None)  # collective
    reduction.fix_reduction_order(ddp, run.timer, *train_set.batch(eval_batches(1, 1, 1)[0], dtype))  # collective
    tree = reduction.gradient_tree(ddp, batches)  # with --virtual-ranks, instead of DDP's own reduction
    reduction.time_phases(model, optimizer, run.timer)
    scale = 1 if tree else world_size  # DDP divides by world_size
    train_set = choose_input(options.input, train_set, batches, range(run.first_step, run.last_step))
    for step in range(run.first_step, run.last_step):
        optimizer.zero_grad()
        for micro_batch in batches.micro_batches(step):  # one; with --virtual-ranks, this rank's sub-shards
            with run.timer.phase("input"):
                images, labels = train_set.batch(batches.indices(step, micro_batch), dtype)
            # Dropout draws for the global batch, from the same seed on each rank, and takes these rows.
            distributed.generator(device).manual_seed(step_seed(options.seed, step))
            rows = batches.rows(step, micro_batch)
            loss = F.nll_loss(ddp(images, rows), labels, reduction="sum")
            # The mean over the global batch, although shards may differ in size or be empty.
            (loss * (scale / rows.global_size)).backward()  # collective: DDP averages the gradients
            if tree:
                tree.add(micro_batch, loss)
        if tree:
            loss = tree.all_reduce(step)  # collective
        optimizer.step()
        actions = run.after_step(loss.detach())  # counts, and beats for the watchdog; no communication
        if actions.sync:  # a log line, an evaluation, a checkpoint, or too long since the last one
            actions = run.sync()  # collective: losses, stop requests, phase times
        if actions.log:
            run.log_metrics(evaluate(run, model, test_set, dtype) if actions.evaluate else {})  # collective
        if actions.save:  # also if a rank was asked to stop: then this raises Stopped
            run.save()  # collective: compare replicas; rank 0 writes
    metrics = run.eval_metrics or evaluate(run, model, test_set, dtype)  # collective
    run.finish(metrics)  # collective: compare replicas; rank 0 writes


def main() -> None:
    options = parse(sys.argv[1:])
    run = Run(Path(__file__).resolve().parent.name, options, env.detect(), Watchdog(), datasets.resolve)
    device = distributed.choose_device(options.device, run.world)
    distributed.set_threads(options.threads)
    distributed.rendezvous(run.world, device, options.timeout, options.backend)  # collective
    train(run, options, device)
    dist.destroy_process_group()
    run.report("torch", torch.__version__, distributed.backend(device, options.backend), device.type)


if __name__ == "__main__":
    log.run(main)
