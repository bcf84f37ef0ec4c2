"""Train ResNet on CIFAR-10 with MindSpore.

    bash scripts/run_resnet50_mindspore.sh 2              # does all the set-up, restarts after a failure
    msrun --worker_num=2 --local_worker_num=2 --join=True apps/resnet50_mindspore/train.py
    python apps/resnet50_mindspore/train.py               # one process

Every rank runs this file, and so does msrun's scheduler, through which the ranks connect. The comment "collective"
marks each call in which a rank waits for the other ranks:

- the rendezvous, and the restore of a checkpoint;
- the gradients at each step (in TrainStep, or in Model);
- once after the first step, until all ranks have compiled it;
- the statistics of each log line, and each evaluation (running statistics, then sums);
- the running statistics and the comparison of all ranks, before a checkpoint and at the end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import auto_parallel
import distributed
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import weights
from data import Split, load, train_loops
from highlevel import fit
from mindspore import Tensor, nn
from model import Forward, ResNet, build_loss, build_model, check_dropout
from options import Options, check_ranks, check_steps, parse
from samestep import env, log
from samestep.data import datasets
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import GlobalBatches, shard

EVAL_BATCH_SIZE = 64  # evaluation batch of a rank, in examples


def build_optimizer(options: Options, model: ResNet) -> nn.Momentum:
    return nn.Momentum(model.trainable_params(), options.lr, options.momentum)


class TrainStep(nn.Cell):  # type: ignore[misc]
    """Update with this rank's shard of a global batch in one compiled graph, and return the mean of weight * loss.

    MindSpore averages gradients over ranks, although shards may differ in size. Sample weights therefore scale the
    losses, so that the gradient is the mean over the samples of the global batch. Padding rows have weight 0.
    """

    def __init__(self, forward: Forward, optimizer: nn.Momentum, reduces: bool, world_size: int) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        self.optimizer = optimizer
        self.reduces = reduces and world_size > 1
        if self.reduces:  # with automatic parallelization, MindSpore inserts the collectives itself
            self.reduce = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=world_size)

    def construct(self, images: Tensor, labels: Tensor, sample_weights: Tensor) -> Tensor:
        loss, gradients = self.gradients(images, labels, sample_weights)
        if self.reduces:
            gradients = self.reduce(gradients)  # collective: MindSpore averages the gradients
        self.optimizer(gradients)
        return loss


def evaluate(run: Run, trained: ResNet, model: ResNet, test_set: Split) -> dict[str, Any]:
    """Return the test set's mean loss, accuracy and number of examples. Each example counts once, on one rank.

    The evaluation uses running statistics averaged over ranks, and afterwards restores each rank's own statistics.

    Args:
        run: run with the options and the monitor.
        trained: the trained model.
        model: the model to evaluate, which is ``trained`` unless MindSpore splits its weights. A second model then gets
            the assembled weights.
        test_set: test set. Each rank evaluates a part of it.
    """
    if model is not trained:
        weights.load_model(model, weights.model_arrays(trained))  # collective
    own = weights.buffers(model)
    average, _ = weights.averaged_buffers(model)  # collective
    weights.load_buffers(model, average)
    model.set_train(False)
    compiles = not model.compile_cache
    if compiles:
        run.monitor.expect_compilation()
    first, last = shard(len(test_set.labels), run.world.rank, run.world.world_size)
    sums = np.zeros(3)
    batches = test_set.evaluation(first, last, EVAL_BATCH_SIZE, run.options.image_size)
    for images, labels, sample_weights in batches.create_tuple_iterator(num_epochs=1):
        counted = sample_weights.asnumpy() > 0
        logits = model(images).asnumpy()[counted].astype(np.float64)
        targets = labels.asnumpy()[counted]
        logits -= logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        wanted = logits[np.arange(len(targets)), targets]
        sums[0] += (log_sums - wanted).sum()
        sums[1] += (logits.argmax(axis=1) == targets).sum()
        sums[2] += len(targets)
        run.monitor.beat()
    model.set_train(True)
    weights.load_buffers(model, own)
    if compiles:
        run.monitor.expect_compilation()  # other ranks may still compile
    by_rank = distributed.all_gather(sums)  # collective
    loss_sum, correct, examples = by_rank.sum(axis=0).tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


@dataclass
class AfterUpdate:
    """Log, evaluate or save after an update, if the action is due.

    Attributes:
        run: run that determines the due actions.
        model: the trained model.
        evaluated: the model to evaluate, as `evaluate` describes.
        forward: the forward pass, which sums the losses in ``total``.
        batches: global batches of the run.
        test_set: test set for the evaluations.
    """

    run: Run
    model: ResNet
    evaluated: ResNet
    forward: Forward
    batches: GlobalBatches
    test_set: Split

    def __call__(self, step: int, loss: Tensor) -> None:
        """Run the actions after an update.

        Args:
            step: number of the update, from 0.
            loss: this rank's mean of weight * loss in the last update of the loop (--sink-size updates).
        """
        run = self.run
        options = run.options
        self.model.batches_tracked += not options.freeze_bn
        if step == run.first_step:
            distributed.all_gather(np.zeros(1))  # collective: wait once until all ranks have compiled the step
        actions = run.after_step()  # counts the step and records progress; the loss stays on the device
        if actions.sync and (step + 1) % options.sink_size == 0:  # the weights come from the loop's last update
            loss_sum, running_loss = self.losses(step, loss)  # collective: waits for the step
            actions = run.sync(loss_sum, running_loss)  # collective: exchange losses, stop requests and phase times
        if actions.log:
            self.forward.total.set_data(Tensor(0.0, ms.float32))
            evaluation: dict[str, Any] = {}
            if actions.evaluate:
                evaluation = evaluate(run, self.model, self.evaluated, self.test_set)  # collective
            run.log_metrics(evaluation)
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: average statistics, compare replicas, and write (rank 0)

    def losses(self, step: int, loss: Tensor) -> tuple[float, float]:
        """Return this rank's parts of two sums of losses: of the update ``step``, and since the last log line.

        Args:
            step: number of the update, from 0.
            loss: this rank's mean of weight * loss in this update.
        """
        with self.run.monitor.collective("train step"):
            last = float(loss.asnumpy())  # collective: waits for the step
            total = float(self.forward.total.asnumpy())
        world_size = self.run.world.world_size
        loss_sum = last * self.batches.size(step) / world_size
        # Earlier batches are full, because only the last batch of an epoch is smaller.
        running_loss = (total - last) * self.run.options.global_batch_size / world_size + loss_sum
        return loss_sum, running_loss


def train(run: Run, options: Options) -> None:
    """Train from the first step, or from the checkpoint if the run resumes."""
    world = run.world
    model = build_model(options.depth, options.freeze_bn, options.seed)
    model.set_train(True)
    if not options.evaluate_only:
        check_dropout(model)
    optimizer = build_optimizer(options, model)
    parts = Parts(
        load=partial(weights.load, model, optimizer, world),
        groups=partial(weights.groups, model, optimizer),
        names=("model", "optimizer", "buffers"),
    )
    run.restore(distributed, parts)  # collective: rank 0 reads the checkpoint for all ranks
    if optimizer.global_step.asnumpy() < 0:  # the checkpoint of an earlier version lacks it
        optimizer.global_step.set_data(Tensor([run.first_step], ms.int32))
    train_set, test_set = load(options.dataset, options.data_dir)
    n = len(train_set.labels)
    check_steps(options, n, run.first_step)  # repeats the launch script's check, because other launchers do not check
    batches = GlobalBatches(
        n,
        options.global_batch_size,
        options.seed,
        rank=world.rank,
        world_size=world.world_size,
        drop_last=bool(options.drop_remainder),
    )
    metadata = distributed.run_metadata(options.device)
    run.start(batches, len(test_set.labels), f"ResNet-{options.depth}", options.device, metadata)
    forward = Forward(model, build_loss(options.loss))
    evaluated = model
    if options.parallel != "data":
        evaluated = build_model(options.depth, options.freeze_bn, options.seed)

    steps = range(run.first_step, run.last_step)
    shards = train_set.training(batches, steps, options.image_size)
    after_update = AfterUpdate(run, model, evaluated, forward=forward, batches=batches, test_set=test_set)
    if steps and options.api == "highlevel":
        train_by_model(run, forward, model, optimizer=optimizer, shards=shards, after_update=after_update)
    elif steps:
        train_by_loop(run, forward, model, optimizer=optimizer, shards=shards, after_update=after_update)

    metrics = run.eval_metrics or evaluate(run, model, evaluated, test_set)  # collective
    run.finish(metrics)  # collective: average statistics, compare replicas, and write (rank 0)


def train_by_model(
    run: Run,
    forward: Forward,
    model: ResNet,
    *,
    optimizer: nn.Momentum,
    shards: ds.Dataset,
    after_update: AfterUpdate,
) -> None:
    """Train the run's steps by mindspore.train.Model."""
    options = run.options
    network: nn.Cell = forward
    if options.parallel != "data":
        network = auto_parallel.cut(forward, model, options.parallel, run.world.world_size)
    fit(run, network, optimizer, shards, after_update, sinks=options.device == "ascend")  # collective


def train_by_loop(
    run: Run,
    forward: Forward,
    model: ResNet,
    *,
    optimizer: nn.Momentum,
    shards: ds.Dataset,
    after_update: AfterUpdate,
) -> None:
    """Train the run's steps by a loop over `TrainStep`."""
    options = run.options
    world_size = run.world.world_size
    cuts = options.parallel != "data"
    train_step: nn.Cell = TrainStep(forward, optimizer, not cuts, world_size)
    if cuts:
        train_step = auto_parallel.cut(train_step, model, options.parallel, world_size)
    sinks = options.device == "ascend" and not cuts  # AutoParallel supports data sinking only in Model
    loops = train_loops(run, train_step, shards, sinks)
    steps = range(run.first_step, run.last_step)
    for first, loss in zip(steps[:: options.sink_size], loops):  # collective
        if first == run.first_step:
            auto_parallel.record_layouts(train_step)
        for step in range(first, first + options.sink_size):
            after_update(step, loss)  # collective, if an action follows


def main() -> None:
    options = parse(sys.argv[1:])
    world = env.detect()
    if world.role == "scheduler":
        distributed.serve(options)  # does not return
    check_ranks(options, world.world_size)
    app = Path(__file__).resolve().parent.name
    run = Run(app, options, world, Watchdog(), datasets.resolve)
    distributed.monitor = run.monitor
    distributed.choose_device(options.device)
    distributed.rendezvous(world, options)  # collective
    train(run, options)
    run.report("mindspore", ms.__version__, distributed.backend(options.device), options.device)


if __name__ == "__main__":
    log.run(main, summarize_error=distributed.summarize_error)
