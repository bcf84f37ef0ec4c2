"""Train a small CNN on MNIST with Horovod.

    bash scripts/run_mnist_horovod.sh 4                   # does all the set-up, restarts after a failure
    horovodrun --gloo -np 4 python apps/mnist_horovod/train.py  # or mpirun, with a Horovod that has MPI

Every rank runs this file. The comment "collective" marks each call in which a rank waits for the other ranks.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import distributed
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from data import load
from model import build_model
from options import parse
from samestep import env, log
from samestep.data import datasets
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, exact, reduction, updates, weights
from torch import Tensor, nn
from virtual_ranks import VirtualRanks

EVAL_BATCH_SIZE = 250  # largest evaluation batch of a rank, in examples


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


def train_step(
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: GlobalBatchSampler,
    images: Tensor,
    labels: Tensor,
) -> Tensor:
    """Update once with this rank's shard of a global batch, and return the shard's summed loss."""
    optimizer.zero_grad()
    scores = model(images)
    loss_sum = F.nll_loss(scores, labels, reduction="sum")
    # Scale to the mean over the global batch: shards may differ in size or be empty.
    sampler.scale(loss_sum, grad_scale=1).backward()
    with distributed.all_reduce_gradients(model, optimizer, options):  # collective: sum of the gradients over ranks
        optimizer.step()
    return loss_sum.detach()


@torch.inference_mode()
def evaluate(run: Run, model: nn.Module, loader: DataLoader, sampler: EvalSampler) -> dict[str, float]:
    """Return the test set's mean loss, accuracy and number of examples. Each example counts once, on one rank."""
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(sampler.num_blocks, 3, dtype=torch.float64, device=device)  # a row per block of the test set
    for block, (images, labels) in zip(sampler.own_blocks, loader):
        scores = model(images)
        sums[block, 0] = F.nll_loss(scores, labels, reduction="sum")
        sums[block, 1] = (scores.argmax(dim=1) == labels).sum()
        sums[block, 2] = len(labels)
        run.monitor.beat()
    model.train()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # collective
    loss_sum, correct, examples = sums.sum(dim=0).tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train from the first step, or from the checkpoint if the run resumes."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    optimizer = distributed.wrap(optimizer, model, options)  # before Parts, which save its state
    parts = Parts(
        load=partial(weights.load, model, optimizer),
        groups=partial(weights.groups, model, optimizer),
        watch=partial(updates.watch, dict(model.named_parameters())),
    )
    run.restore(distributed, parts)  # collective: rank 0 reads the checkpoint for all ranks

    # The global batches are the same at any world size. Each rank evaluates some blocks of the test set.
    train_set, test_set = load(options.dataset, options.data_dir, device, dtype)
    rank = run.world.rank
    world_size = run.world.world_size
    sampler = GlobalBatchSampler(
        len(train_set), options.global_batch_size, rank, world_size, options.seed, virtual_ranks=options.virtual_ranks
    )
    loader = DataLoader(train_set, batch_sampler=sampler, seeded=False)  # no augmentation
    blocks = options.virtual_ranks or world_size  # at least one block per rank
    eval_sampler = EvalSampler(len(test_set), EVAL_BATCH_SIZE, blocks=blocks, rank=rank, world_size=world_size)
    eval_loader = DataLoader(test_set, batch_sampler=eval_sampler, seeded=False)
    metadata = distributed.run_metadata(device, model)
    run.start(sampler.batches, len(test_set), options.model, device.type, metadata)

    # Make dropout independent of the world size, and sums of gradients independent of restarts.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # collective
    exact(model, sampler, timer=run.timer)  # in place
    reduction.time_phases(model, optimizer, run.timer)  # for reports of slow ranks
    update = VirtualRanks(model, sampler).train_step if options.virtual_ranks else partial(train_step, options)

    for images, labels in run.batches(loader):  # from the restored step to the run's last step
        images = images.to(device)
        labels = labels.to(device)
        loss_sum = update(model, optimizer, sampler, images, labels)  # collective
        actions = run.after_step(loss_sum)  # counts the step and records progress, without communication
        if actions.sync:  # a log line, evaluation or checkpoint is due, or an agreed number of steps has passed
            actions = run.sync()  # collective: exchange losses, stop requests and phase times
        if actions.log:
            evaluation: dict[str, float] = {}
            if actions.evaluate:
                evaluation = evaluate(run, model, eval_loader, eval_sampler)  # collective
            run.log_metrics(evaluation)
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: compare replicas, and write the checkpoint (rank 0)
    metrics = run.eval_metrics or evaluate(run, model, eval_loader, eval_sampler)  # collective, on all ranks or none
    run.finish(metrics)  # collective: compare replicas, and write the weights (rank 0)


def main() -> None:
    options = parse(sys.argv[1:])
    app = Path(__file__).resolve().parent.name
    run = Run(app, options, env.detect(), monitor=Watchdog(), resolve_dataset=datasets.resolve)
    device = distributed.choose_device(options.device, run.world)
    distributed.set_threads(options.threads)
    distributed.rendezvous(run.world, device, options.timeout, options.transport)  # collective
    train(run, options, device)
    hvd.shutdown()
    run.report("horovod", distributed.VERSION, distributed.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
