"""Train ResNet on CIFAR-10 with MindSpore.

    bash scripts/run_resnet50_mindspore.sh 2              # does all the set-up, restarts after a failure
    msrun --worker_num=2 --local_worker_num=2 --join=True apps/resnet50_mindspore/train.py
    python apps/resnet50_mindspore/train.py               # one process

Every rank runs this file, and so does msrun's scheduler, which only helps them to find each other. They talk at seven
places, each marked: at the rendezvous, when they restore a checkpoint, at each step for the gradients (in TrainStep),
at each log line for the loss, at each evaluation (running statistics, then sums), before a checkpoint is saved (running
statistics, then: do all hold the same?), and at the end (the same two).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import ranks
import weights
from data import Split, feed, load
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel
from model import ResNet, build_loss, build_model
from options import parse
from samestep import env, log
from samestep.env import World
from samestep.options import Options
from samestep.run import Run
from samestep.sharding import GlobalBatches, shard
from samestep.watchdog import Watchdog

APP = Path(__file__).resolve().parent.name
EVALUATION_BATCH = 64  # images at a time; of no influence on the result


def build_optimizer(options: Options, model: ResNet) -> nn.Momentum:
    return nn.Momentum(model.trainable_params(), options.lr, options.momentum)


class Forward(nn.Cell):  # type: ignore[misc]
    """Images, labels and sample weights of one batch to the mean of weight * loss."""

    def __init__(self, model: ResNet, loss: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.loss = model, loss

    def construct(self, images: Tensor, labels: Tensor, sample_weights: Tensor) -> Tensor:
        return (self.loss(self.model(images), labels) * sample_weights).mean()


class TrainStep(nn.Cell):  # type: ignore[misc]
    """One update with this rank's shard of a global batch, compiled into one graph; returns the mean of weight * loss.

    The gradient must be the mean over the global batch's *samples*, although shards may differ in size. MindSpore
    averages over ranks, so each sample is scaled by its weight; rows that only fill up a shard have weight 0.
    """

    def __init__(self, forward: Forward, optimizer: nn.Momentum, parallel: str, world_size: int) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        self.optimizer, self.reduces = optimizer, parallel == "data" and world_size > 1
        if self.reduces:  # otherwise MindSpore places the collectives itself, where it cuts the operators
            self.reduce = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=world_size)

    def construct(self, images: Tensor, labels: Tensor, sample_weights: Tensor) -> Tensor:
        loss, gradients = self.gradients(images, labels, sample_weights)
        if self.reduces:
            gradients = self.reduce(gradients)  # ranks talk: MindSpore averages the gradients
        self.optimizer(gradients)
        return loss


def build_step(options: Options, model: ResNet, optimizer: nn.Momentum, world_size: int) -> nn.Cell:
    """The graph that trains, cut by MindSpore where --parallel says so."""
    step = TrainStep(Forward(model, build_loss(options.loss)), optimizer, options.parallel, world_size)
    if options.parallel == "data":
        return step
    cut = AutoParallel(step, "semi_auto" if options.parallel == "semi-auto" else "recursive_programming")
    cut.enable_gradients_mean()
    return cut


def evaluate(model: ResNet, test: Split, image_size: int, world: World, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank.

    The model evaluated has the running statistics averaged over ranks; each rank then has its own back.
    """
    own = weights.buffers(model)
    weights.load_buffers(model, weights.averaged_buffers(model)[0])  # ranks talk
    model.set_train(False)
    first, last = shard(len(test.labels), world.rank, world.world_size)
    sums = np.zeros(3)
    batches = test.evaluation(first, last, EVALUATION_BATCH, image_size)
    for images, labels, sample_weights in batches.create_tuple_iterator(num_epochs=1):
        counted = sample_weights.asnumpy() > 0
        logits = model(images).asnumpy()[counted].astype(np.float64)
        wanted = labels.asnumpy()[counted]
        logits -= logits.max(axis=1, keepdims=True)
        sums[0] += (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(wanted)), wanted]).sum()
        sums[1] += (logits.argmax(axis=1) == wanted).sum()
        sums[2] += len(wanted)
        watchdog.beat()
    model.set_train(True)
    weights.load_buffers(model, own)
    loss_sum, correct, examples = ranks.all_gather(sums).sum(axis=0).tolist()  # ranks talk
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, world: World) -> None:
    """Train, or go on training."""
    model = build_model(options.depth, options.freeze_bn, options.seed)
    model.set_train(True)
    optimizer = build_optimizer(options, model)
    run.restore(ranks, partial(weights.load, model, optimizer, world))  # ranks talk: rank 0 reads, all load the same
    training, test = load(options.dataset, options.data_dir)
    n = len(training.labels)
    batches = GlobalBatches(n, options.global_batch_size, options.seed, world.rank, world.world_size)
    run.begin(batches, len(test.labels), f"ResNet-{options.depth}", options.device, ranks.facts(options.device))

    graph = build_step(options, model, optimizer, world.world_size)
    shards = training.training(batches, range(run.start, run.stop), options.image_size)
    train_step = feed(graph, shards, options.device)
    unread: list[tuple[Tensor, int]] = []  # losses that may still be being computed, and batch sizes
    for step in range(run.start, run.stop):
        unread.append((train_step(), batches.size(step)))  # ranks talk
        model.batches_tracked += not options.freeze_bn
        due = run.done(step)
        if due.log:
            loss_sums = [float(loss.asnumpy()) * size / world.world_size for loss, size in unread]
            unread.clear()
            sums = ranks.all_gather(np.array([loss_sums[-1], sum(loss_sums)])).sum(axis=0)  # ranks talk
            tested = evaluate(model, test, options.image_size, world, run.watchdog) if due.test else {}  # ranks talk
            run.record(float(sums[0]), float(sums[1]), tested)
        if due.save:
            run.save(ranks, weights.groups(model, optimizer))  # ranks talk: they average, compare; then rank 0 writes

    tested = run.tested or evaluate(model, test, options.image_size, world, run.watchdog)  # ranks talk
    weights.load_buffers(model, weights.averaged_buffers(model)[0])  # ranks talk
    run.finish(ranks, weights.model_arrays(model), tested)  # ranks talk: all must hold the same weights


def main() -> None:
    options = parse(sys.argv[1:])
    world = env.detect(os.environ)
    if world.role == "scheduler":
        ranks.serve(options.timeout)  # does not return
    run = Run(APP, options, world)
    ranks.choose_device(options.device)
    ranks.rendezvous(world, options.device, options.timeout)  # ranks talk
    train(run, options, world)
    run.report("mindspore", ms.__version__, ranks.backend(options.device), options.device)


if __name__ == "__main__":
    log.run(main, headline=ranks.headline)
