"""Train LeNet on MNIST with PaddlePaddle.

    bash scripts/run_lenet_paddle.sh 4                    # does all the set-up, restarts after a failure
    python -m paddle.distributed.launch --nproc_per_node 4 apps/lenet_paddle/train.py      # fleetrun is the same
    python apps/lenet_paddle/train.py --launcher spawn --nprocs 4
    python apps/lenet_paddle/train.py                     # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/lenet_paddle/train.py   # one a machine

Every rank runs this file. They talk at nine places, each marked: at the rendezvous, when they restore a checkpoint,
when the model is distributed and when its gradient buckets are ordered, at each step for the gradients (in backward),
at each log line for the loss, at each evaluation, before a checkpoint is saved, and at the end: do all hold the same
weights?

--api chooses among Paddle's ways to write this: `basic` and `fleet` differ in ranks.py alone, `highlevel`
(highlevel.py) leaves the loop to paddle.Model. All three take the same steps and talk at the same places.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import ranks
import weights
from data import Split, load
from highlevel import Batches, HighLevel
from model import build_model
from options import check_gpus, parse
from paddle import Tensor, nn
from paddle.optimizer import Optimizer
from samestep import env, log
from samestep.options import Options
from samestep.phases import Phases
from samestep.run import Run
from samestep.sharding import GlobalBatches, Rows, shard, step_seed
from samestep.watchdog import Watchdog
from spawn import spawn
from visual import Scalars, check_folder

APP = Path(__file__).resolve().parent.name
EVALUATION_BATCH = 1000  # images at a time; of no influence on the result


def build_optimizer(options: Options, model: nn.Layer) -> Optimizer:
    if options.optimizer == "adam":  # epsilon is placed as in PyTorch's: beside the root of the corrected moment
        return paddle.optimizer.Adam(options.lr, parameters=model.parameters())
    return paddle.optimizer.Momentum(options.lr, options.momentum, parameters=model.parameters())


def train_step(
    model: nn.Layer, optimizer: Optimizer, images: Tensor, labels: Tensor, rows: Rows, phases: Phases
) -> tuple[Tensor, Tensor]:
    """One update with this rank's shard of a global batch, ``rows`` of it; returns its summed loss and right answers.

    The gradient must be the mean over the global batch's *samples*, although shards may differ in size. DataParallel
    averages over ranks, so each rank's summed loss is scaled by world_size / rows.global_size. A rank without samples
    takes part with a gradient of zeros.
    """
    scores = model(images)
    loss_sum = F.cross_entropy(scores, labels, reduction="sum")
    (loss_sum * (dist.get_world_size() / rows.global_size)).backward()  # ranks talk: the gradients are added up
    phases.end("waiting")
    optimizer.step()
    optimizer.clear_grad()
    phases.end("optimizer")
    return loss_sum.detach(), (scores.argmax(axis=1) == labels).sum()


@paddle.no_grad()  # type: ignore[untyped-decorator]
def evaluate(model: nn.Layer, test: Split, dtype: str, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank.

    Accuracy is the share of images whose label has the highest score; ``test_accuracy_top2``, that whose label is
    among the two highest.
    """
    model.eval()
    first, last = shard(len(test.labels), dist.get_rank(), dist.get_world_size())
    sums = paddle.zeros([4], dtype="float64")
    for begin in range(first, last, EVALUATION_BATCH):
        images, labels = test.batch(np.arange(begin, min(begin + EVALUATION_BATCH, last)), dtype)
        scores = model(images)
        hits = (paddle.topk(scores, 2)[1] == labels.unsqueeze(1)).astype("float64").sum(axis=0)
        loss_sum = F.cross_entropy(scores, labels, reduction="sum").astype("float64")
        sums += paddle.stack([loss_sum, hits[0], hits.sum(), paddle.to_tensor(len(labels), dtype="float64")])
        watchdog.beat()
    model.train()
    ranks.all_reduce(sums)  # ranks talk
    loss_sum, correct, within_two, examples = sums.tolist()
    return {
        "test_loss": loss_sum / examples,
        "test_accuracy": correct / examples,
        "test_accuracy_top2": within_two / examples,
        "test_examples": int(examples),
    }


def train(run: Run, options: Options, device: str) -> None:
    """Train, or go on training."""
    dtype = options.dtype
    model = build_model(dtype, options.seed)
    optimizer = build_optimizer(options, model)
    run.restore(ranks, partial(weights.load, model, optimizer))  # ranks talk: rank 0 reads, all load the same bytes
    training, test = load(options.dataset, options.data_dir)
    n = len(training.labels)
    batches = GlobalBatches(n, options.global_batch_size, options.seed, dist.get_rank(), dist.get_world_size())
    run.begin(batches, len(test.labels), "lenet", device, ranks.facts(device))
    writes = options.visualdl and run.world.rank == 0 and not options.evaluate_only
    scalars = Scalars(options.visualdl, options.run_dir) if writes else None

    sample = training.batch(np.arange(1), dtype)
    if options.api == "highlevel":
        high = HighLevel(model, optimizer, *sample)  # ranks talk
        test_now = partial(high.evaluate, test, dtype, run.watchdog)
    else:
        parallel, its_optimizer = ranks.distribute(options.api, model, optimizer)  # ranks talk
        ranks.order_sums(parallel, *sample)  # ranks talk
        test_now = partial(evaluate, model, test, dtype, run.watchdog)
    ranks.time_gradients(model, run.phases)
    since = paddle.zeros([2], dtype="float64")  # this rank's summed loss and right answers since the last record

    def after_update(step: int, loss_sum: Tensor, correct: Tensor) -> None:
        """What is due after the update ``step``, in which this rank's shard had the loss ``loss_sum``."""
        since.add_(paddle.stack([loss_sum.astype("float64"), correct.astype("float64")]))
        due = run.done(step)
        if due.talk:
            says = paddle.to_tensor(run.says(), dtype="float64")
            sums = paddle.concat([loss_sum.astype("float64").reshape([1]), since, says])
            ranks.all_reduce(sums)  # ranks talk
            due = run.heard(due, sums[3:].tolist())
        if due.log:
            since.zero_()
            tested = test_now() if due.test else {}  # ranks talk
            line = run.record(sums[0].item(), sums[1].item(), tested, sums[2].item())
            if scalars:
                scalars.write(line)
        if due.save:
            run.save(ranks, weights.groups(model, optimizer))  # ranks talk: they compare, then rank 0 writes

    steps = range(run.start, run.stop)
    if options.api == "highlevel":
        high.fit(Batches(training, batches, dtype, steps), options.epochs, run.phases, after_update)  # ranks talk
    else:
        for step in steps:
            run.phases.begin()
            paddle.seed(step_seed(options.seed, step))
            images, labels = training.batch(batches.indices(step), dtype)
            run.phases.end("input")
            shard_of = images, labels, batches.rows(step)
            loss_sum, correct = train_step(parallel, its_optimizer, *shard_of, run.phases)  # ranks talk
            after_update(step, loss_sum, correct)  # ranks talk, where something is due
    if scalars:
        scalars.close()

    tested = run.tested or test_now()  # ranks talk
    run.finish(ranks, weights.model_arrays(model), tested)  # ranks talk: all must hold the same weights


def run_rank() -> None:
    """What every rank runs, whoever started it."""
    options = parse(sys.argv[1:])
    run = Run(APP, options, env.detect(os.environ))
    check_gpus(options, run.world.local_world_size, run.world.local_rank or 0)
    if options.visualdl and options.run_dir and run.world.rank == 0 and not options.evaluate_only:
        check_folder(options.visualdl, options.run_dir)  # before others wait for this rank
    device = ranks.choose_device(options.device, options.gpus, run.world)
    ranks.rendezvous(run.world, device, options.timeout, options.api)  # ranks talk
    train(run, options, device)
    run.report("paddle", paddle.__version__, ranks.backend(device), device, api=options.api)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.launcher == "spawn" and env.detect(os.environ).launcher == "none":
        spawn(run_rank, options)  # no rank itself, so it has no Run
    else:
        run_rank()


if __name__ == "__main__":
    log.run(main)
