"""Train a small CNN on MNIST with Horovod.

    bash scripts/run_mnist_horovod.sh 4                   # does all the set-up, restarts after a failure
    horovodrun --gloo -np 4 python apps/mnist_horovod/train.py
    mpirun -np 4 python apps/mnist_horovod/train.py       # a Horovod built with MPI
    python apps/mnist_horovod/train.py                    # one process

Every rank runs this file. They talk at eight places, each marked: at the rendezvous, when they restore a checkpoint,
when rank 0's weights become everyone's, at each step for the gradients (in its update), at each log line for
the loss, at each evaluation, before a checkpoint is saved, and at the end: do all hold the same weights?
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import numpy as np
import ranks
import torch
import torch.nn.functional as F
import weights
from data import Split, load
from model import build_model
from options import parse
from samestep import env, log
from samestep.options import Options
from samestep.run import Run
from samestep.sharding import GlobalBatches, Rows, shard, step_seed
from samestep.watchdog import Watchdog
from torch import Tensor, nn

APP = Path(__file__).resolve().parent.name
EVALUATION_BATCH = 1000  # images at a time; of no influence on the result


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


def train_step(optimizer: torch.optim.Optimizer, loss_sum: Tensor, rows: Rows) -> None:
    """One update from the summed loss of this rank's shard of a global batch, ``rows`` of it.

    The gradient must be the mean over the global batch's *samples*, although shards may differ in size. Horovod
    adds them up, so each rank's summed loss is divided by rows.global_size. A rank without samples takes
    part with a gradient of zeros.
    """
    optimizer.zero_grad()
    (loss_sum / rows.global_size).backward()  # and then ranks talk: the step begins by adding up the gradients
    optimizer.step()


@torch.inference_mode()
def evaluate(model: nn.Module, test: Split, dtype: torch.dtype, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank."""
    model.eval()
    first, last = shard(len(test.labels), hvd.rank(), hvd.size())
    sums = torch.zeros(3, dtype=torch.float64, device=test.labels.device)
    for begin in range(first, last, EVALUATION_BATCH):
        images, labels = test.batch(np.arange(begin, min(begin + EVALUATION_BATCH, last)), dtype)
        scores = model(images, Rows(0, len(images)))
        sums[0] += F.nll_loss(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
        watchdog.beat()
    model.train()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # ranks talk
    loss_sum, correct, examples = sums.tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train, or go on training."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    ranks.sum_gradients(model, optimizer, getattr(hvd.Compression, options.compression))
    run.restore(ranks, partial(weights.load, model, optimizer))  # ranks talk: rank 0 reads, all load the same bytes
    training, test = load(options.dataset, options.data_dir, device)
    n = len(training.labels)
    batches = GlobalBatches(n, options.global_batch_size, options.seed, hvd.rank(), hvd.size())
    run.begin(batches, len(test.labels), options.model, device.type, ranks.facts(device))

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # ranks talk
    ranks.time_phases(model, optimizer, run.phases)
    generator = ranks.generator(device)
    sum_since = torch.zeros((), dtype=torch.float64, device=device)  # this rank's summed loss since the last record
    for step in range(run.start, run.stop):
        run.phases.begin()
        generator.manual_seed(step_seed(options.seed, step))
        images, labels = training.batch(batches.indices(step), dtype)
        run.phases.end("input")
        due, rows = run.due(step), batches.rows(step)
        loss_sum = F.nll_loss(model(images, rows), labels, reduction="sum")
        sum_since += loss_sum.detach()
        if due.talk:
            sums = torch.tensor([loss_sum.detach(), sum_since, *run.says()], dtype=torch.float64, device=device)
        train_step(optimizer, loss_sum, rows)  # ranks talk
        run.done(step)
        if due.talk:
            sums = hvd.allreduce(sums, op=hvd.Sum)  # ranks talk
            due = run.heard(due, sums[2:].tolist())
        if due.log:
            sum_since.zero_()
            tested = evaluate(model, test, dtype, run.watchdog) if due.test else {}  # ranks talk
            run.record(sums[0].item(), sums[1].item(), tested)
        if due.save:
            run.save(ranks, weights.groups(model, optimizer))  # ranks talk: they compare, then rank 0 writes

    tested = run.tested or evaluate(model, test, dtype, run.watchdog)  # ranks talk
    run.finish(ranks, weights.model_arrays(model), tested)  # ranks talk: all must hold the same weights


def main() -> None:
    options = parse(sys.argv[1:])
    run = Run(APP, options, env.detect(os.environ))
    device = ranks.choose_device(options.device, run.world)
    ranks.rendezvous(run.world, device, options.timeout, options.transport)  # ranks talk
    train(run, options, device)
    hvd.shutdown()
    run.report("horovod", horovod.__version__, ranks.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
