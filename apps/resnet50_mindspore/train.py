"""Train ResNet on CIFAR-10 with MindSpore.

    bash scripts/run_resnet50_mindspore.sh 2              # does all the set-up, restarts after a failure
    msrun --worker_num=2 --local_worker_num=2 --join=True apps/resnet50_mindspore/train.py
    python apps/resnet50_mindspore/train.py               # one process

Every rank runs this file, and so does msrun's scheduler, which only helps them to find each other. They talk at eight
places, each marked: at the rendezvous, when they restore a checkpoint, at each step for the gradients (in TrainStep, or
in Model), once after the first step (have all compiled it?), at each log line for the loss, at each evaluation (running
statistics, then sums), before a checkpoint is saved (running statistics, then: do all hold the same?), and at the end
(the same two).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import auto_parallel
import mindspore as ms
import numpy as np
import ranks
import weights
from data import Split, feed, load, rows_per_rank
from highlevel import fit
from mindspore import Parameter, Tensor, nn, ops
from model import ResNet, build_loss, build_model
from options import check_steps, parse
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
    """Images, labels and sample weights of one batch to the mean of weight * loss, which is added to ``total``."""

    def __init__(self, model: ResNet, loss: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.loss = model, loss
        self.total = Parameter(Tensor(0.0, ms.float32), "total", requires_grad=False)

    def construct(self, images: Tensor, labels: Tensor, sample_weights: Tensor) -> Tensor:
        mean = (self.loss(self.model(images), labels) * sample_weights).mean()
        ops.assign_add(self.total, mean)
        return mean


class TrainStep(nn.Cell):  # type: ignore[misc]
    """One update with this rank's shard of a global batch, compiled into one graph; returns the mean of weight * loss.

    The gradient must be the mean over the global batch's *samples*, although shards may differ in size. MindSpore
    averages over ranks, so each sample is scaled by its weight; rows that only fill up a shard have weight 0.
    """

    def __init__(self, forward: Forward, optimizer: nn.Momentum, reduces: bool, world_size: int) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        self.optimizer, self.reduces = optimizer, reduces and world_size > 1
        if self.reduces:  # otherwise MindSpore places the collectives itself, where it cuts the operators
            self.reduce = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=world_size)

    def construct(self, images: Tensor, labels: Tensor, sample_weights: Tensor) -> Tensor:
        loss, gradients = self.gradients(images, labels, sample_weights)
        if self.reduces:
            gradients = self.reduce(gradients)  # ranks talk: MindSpore averages the gradients
        self.optimizer(gradients)
        return loss


def evaluate(model: ResNet, test: Split, image_size: int, world: World, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank.

    The model evaluated has the running statistics averaged over ranks; each rank then has its own back.
    """
    own = weights.buffers(model)
    weights.load_buffers(model, weights.averaged_buffers(model)[0])  # ranks talk
    model.set_train(False)
    compiles = not model.compile_cache
    if compiles:
        watchdog.compiles()
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
    if compiles:
        watchdog.compiles()  # other ranks may still be at it
    loss_sum, correct, examples = ranks.all_gather(sums).sum(axis=0).tolist()  # ranks talk
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, world: World) -> None:
    """Train, or go on training."""
    model = build_model(options.depth, options.freeze_bn, options.seed)
    model.set_train(True)
    optimizer = build_optimizer(options, model)
    run.restore(ranks, partial(weights.load, model, optimizer, world))  # ranks talk: rank 0 reads, all load the same
    training, test = load(options.dataset, options.data_dir)
    n, size, drops = len(training.labels), options.global_batch_size, bool(options.drop_remainder)
    check_steps(options, n, run.start)  # the launch script did, where there is one
    batches = GlobalBatches(n, size, options.seed, world.rank, world.world_size, drop_last=drops)
    run.begin(batches, len(test.labels), f"ResNet-{options.depth}", options.device, ranks.facts(options.device))
    forward = Forward(model, build_loss(options.loss))

    def after_update(step: int, loss: Tensor) -> None:
        """What is due after the update ``step``, whose mean of weight * loss on this rank was ``loss``."""
        model.batches_tracked += not options.freeze_bn
        if step == run.start:
            ranks.all_gather(np.zeros(1))  # ranks talk, once: the first step counts as done when all have compiled it
        due = run.done(step)
        if due.talk and (step + 1) % options.sink_size == 0:  # in mid-loop the weights are those of the loop's end
            last, total = float(loss.asnumpy()), float(forward.total.asnumpy())  # ranks talk, until this step is done
            loss_sum = last * batches.size(step)
            mine = [loss_sum, (total - last) * size + loss_sum]  # only an epoch's last batch, always due, is smaller
            sums = ranks.all_gather(np.array([*mine, *run.says()])).sum(axis=0)  # ranks talk
            due = run.heard(due, sums[2:].tolist())
        if due.log:
            forward.total.set_data(Tensor(0.0, ms.float32))
            sums = sums / world.world_size
            tested = evaluate(model, test, options.image_size, world, run.watchdog) if due.test else {}  # ranks talk
            run.record(float(sums[0]), float(sums[1]), tested)
        if due.save:
            run.save(ranks, weights.groups(model, optimizer))  # ranks talk: they average, compare; then rank 0 writes

    steps = range(run.start, run.stop)
    shards = training.training(batches, steps, options.image_size)
    sinks = options.device == "ascend" and options.parallel == "data"
    if options.api == "highlevel" and steps:
        sink_size, print_every = options.sink_size if sinks else None, 0 if options.quiet else options.log_every
        fit(forward, optimizer, shards, steps, after_update, run, sink_size, print_every)  # ranks talk
    elif steps:
        graph: nn.Cell = TrainStep(forward, optimizer, options.parallel == "data", world.world_size)
        if options.parallel == "auto":
            graph = auto_parallel.cut(graph, rows_per_rank(batches), options.image_size)
        loops = range(run.start, run.stop, options.sink_size)
        for first, loss in zip(loops, feed(graph, shards, sinks, options.sink_size, run.phases)):  # ranks talk
            for step in range(first, first + options.sink_size):
                after_update(step, loss)  # ranks talk, where something is due

    tested = run.tested or evaluate(model, test, options.image_size, world, run.watchdog)  # ranks talk
    weights.load_buffers(model, weights.averaged_buffers(model)[0])  # ranks talk
    run.finish(ranks, weights.model_arrays(model), tested)  # ranks talk: all must hold the same weights


def main() -> None:
    options = parse(sys.argv[1:])
    world = env.detect(os.environ)
    if world.role == "scheduler":
        ranks.serve(options)  # does not return
    run = Run(APP, options, world)
    ranks.choose_device(options.device)
    ranks.rendezvous(world, options)  # ranks talk
    train(run, options, world)
    run.report("mindspore", ms.__version__, ranks.backend(options.device), options.device)


if __name__ == "__main__":
    log.run(main, headline=ranks.headline)
