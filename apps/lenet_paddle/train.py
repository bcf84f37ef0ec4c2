"""Train LeNet on MNIST with PaddlePaddle.

    bash scripts/run_lenet_paddle.sh 4                    # does all the set-up, restarts after a failure
    python -m paddle.distributed.launch --nproc_per_node 4 apps/lenet_paddle/train.py      # or fleetrun
    python apps/lenet_paddle/train.py --launcher spawn --nprocs 4
    python apps/lenet_paddle/train.py                     # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/lenet_paddle/train.py  # per machine

Every rank runs this file. Ranks communicate at these points, which comments mark as "collective":

- the rendezvous, and the restore of a checkpoint;
- the distribution of the model and the order of its gradient buckets;
- the gradients of each step, in backward;
- the losses of each log line, and each evaluation;
- the comparison of replicas before each checkpoint and at the end.

--api selects one of Paddle's APIs. `basic` and `fleet` differ only in distributed.py. `highlevel` uses the loop of
paddle.Model (highlevel.py). All three APIs compute the same steps and communicate at the points above.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import weights
from data import EVAL_BATCH_SIZE, Split, load
from highlevel import HighLevel
from model import build_model, count_correct
from options import check_gpus, parse
from paddle import Tensor, nn
from samestep import env, log
from samestep.data import datasets
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import GlobalBatches, eval_batches, shard, step_seed
from samestep.step_timer import COMMUNICATION, INPUT, OPTIMIZER
from spawn import spawn
from visual import Scalars, check_folder

APP = Path(__file__).resolve().parent.name


def build_optimizer(options: Options, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Return the optimizer of --optimizer."""
    if options.optimizer == "adam":  # like PyTorch, Paddle adds epsilon to the root of the corrected moment
        return paddle.optimizer.Adam(options.lr, parameters=model.parameters())
    return paddle.optimizer.Momentum(options.lr, options.momentum, parameters=model.parameters())


@paddle.no_grad()  # type: ignore[untyped-decorator]
def evaluate(model: nn.Layer | HighLevel, test: Split, run: Run) -> dict[str, Any]:
    """Return the test set's mean loss, top-1 accuracy, top-2 accuracy and number of examples."""
    if isinstance(model, HighLevel):
        sums = model.sum_shards(test)  # collective
    else:
        model.eval()
        parts = run.options.virtual_ranks or run.world.world_size
        batches = eval_batches(len(test.labels), EVAL_BATCH_SIZE, parts)
        rows = np.zeros((len(batches), 4))  # a row per batch
        first, end = shard(len(batches), dist.get_rank(), dist.get_world_size())
        for k in range(first, end):
            images, labels = test.batch(batches[k], run.options.dtype)
            scores = model(images)
            loss_sum = F.cross_entropy(scores, labels, reduction="sum")
            rows[k, 0] = loss_sum.item()
            rows[k, 1:3] = count_correct(scores, labels).tolist()
            rows[k, 3] = len(labels)
            run.monitor.beat()
        model.train()
        sums = paddle.to_tensor(rows.ravel())
    totals = distributed.all_reduce(sums)  # collective
    loss_sum, correct, correct_top2, examples = np.reshape(totals, (-1, 4)).sum(axis=0).tolist()
    return {
        "test_loss": loss_sum / examples,
        "test_accuracy": correct / examples,
        "test_accuracy_top2": correct_top2 / examples,
        "test_examples": int(examples),
    }


def train_virtual_ranks(
    run: Run,
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    train_set: Split,
    batches: GlobalBatches,
    after_step: Callable[[Tensor, Tensor], None],
) -> None:
    """Train the run's steps with the same bits at any world size (--virtual-ranks)."""
    tree = distributed.GradientTree(model, batches)
    distributed.time_gradients(model, run.timer)
    for step in range(run.first_step, run.last_step):
        seed = step_seed(run.options.seed, step)
        for micro_batch in batches.micro_batches(step):
            # Each micro-batch draws its own random numbers, whichever rank computes it.
            number, _ = micro_batch
            distributed.seed_generators(step_seed(seed, number))
            with run.timer.phase(INPUT):
                indices = batches.indices(step, micro_batch)
                images, labels = train_set.batch(indices, run.options.dtype)
            scores = model(images)
            loss_sum = F.cross_entropy(scores, labels, reduction="sum")
            (loss_sum / batches.size(step)).backward()
            tree.add(micro_batch, loss_sum, *count_correct(scores, labels))
        with run.monitor.collective("all_reduce"):
            loss_sum, *correct = tree.all_reduce(step, 3)  # collective
        run.timer.mark(COMMUNICATION)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)  # removes the gradients; adding to zeros would turn -0.0 into +0.0
        run.timer.mark(OPTIMIZER)
        after_step(loss_sum, paddle.stack(correct))  # collective


def train_parallel(
    run: Run,
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    train_set: Split,
    batches: GlobalBatches,
    after_step: Callable[[Tensor, Tensor], None],
) -> None:
    """Train the run's steps by DataParallel or fleet."""
    dtype = run.options.dtype
    parallel, parallel_optimizer = distributed.distribute(run.options.api, model, optimizer)  # collective
    sample, label = train_set.batch(np.arange(1), dtype)  # any sample
    with run.monitor.collective("backward"):
        distributed.fix_reduction_order(model, lambda: F.cross_entropy(parallel(sample), label).backward())
    distributed.time_gradients(model, run.timer)
    for step in range(run.first_step, run.last_step):
        distributed.seed_generators(step_seed(run.options.seed, step))  # a resumed run draws the same random numbers
        with run.timer.phase(INPUT):
            images, labels = train_set.batch(batches.indices(step), dtype)
        scores = parallel(images)
        loss_sum = F.cross_entropy(scores, labels, reduction="sum")
        with run.monitor.collective("backward"):  # a Python traceback does not show the wait, which is in C++
            # Scale to the mean over the global batch: DataParallel averages over ranks, and shards may differ in size.
            (loss_sum * (batches.world_size / batches.size(step))).backward()  # collective: averages gradients
        run.timer.mark(COMMUNICATION)
        parallel_optimizer.step()
        parallel_optimizer.clear_grad()
        run.timer.mark(OPTIMIZER)
        after_step(loss_sum.detach(), count_correct(scores, labels))  # collective


def train(run: Run, options: Options, device: str) -> None:
    """Train from the first step, or from the checkpoint if the run resumes."""
    model = build_model(options.dtype, options.seed)
    distributed.check_layers(model, options, run.world.world_size)
    optimizer = build_optimizer(options, model)
    parts = Parts(load=partial(weights.load, model, optimizer), groups=partial(weights.groups, model, optimizer))
    run.restore(distributed, parts)  # collective: rank 0 reads the checkpoint for all ranks
    train_set, test_set = load(options.dataset, options.data_dir)
    batches = GlobalBatches(
        len(train_set.labels),
        options.global_batch_size,
        options.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        virtual_ranks=options.virtual_ranks,
    )
    metadata = distributed.run_metadata(device)
    run.start(batches, len(test_set.labels), "lenet", device, metadata)
    scalars: Scalars | None = None
    if writes_scalars(options, run.world):
        scalars = Scalars(options.visualdl, options.run_dir)

    def after_step(loss_sum: Tensor, correct: Tensor) -> None:
        """Count an update, and log, evaluate or save if the action is due.

        Args:
            loss_sum: summed loss of this rank's shard. With --virtual-ranks, rank 0 passes the global batch's summed
                loss, and other ranks pass 0.
            correct: `count_correct` of the same samples.
        """
        top1, top2 = correct.tolist()
        actions = run.after_step(loss_sum, correct=top1, correct_top2=top2)  # counts the step and records progress
        if actions.sync:  # a log line, evaluation or checkpoint is due, or an agreed number of steps has passed
            actions = run.sync()  # collective: exchange losses, stop requests and phase times
        if actions.log:
            evaluation: dict[str, Any] = {}
            if actions.evaluate:
                evaluation = evaluate(trainee, test_set, run)  # collective
            line = run.log_metrics(evaluation)
            if scalars:
                scalars.write(line)
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: compare replicas, and write the checkpoint (rank 0)

    trainee: nn.Layer | HighLevel = model
    if options.api == "highlevel":
        images, labels = train_set.batch(np.arange(1), options.dtype)  # any sample
        trainee = HighLevel(run, model, optimizer, images, labels)  # collective
        trainee.train(train_set, batches, after_step)  # collective
    else:
        take_steps = train_virtual_ranks if options.virtual_ranks else train_parallel
        take_steps(run, model, optimizer, train_set, batches, after_step)
    if scalars:
        scalars.close()
    metrics = run.eval_metrics or evaluate(trainee, test_set, run)  # collective
    run.finish(metrics)  # collective: compare replicas, and write the weights (rank 0)


def writes_scalars(options: Options, world: env.World) -> bool:
    """Return whether this rank writes scalars for VisualDL: rank 0 with --visualdl and without --evaluate-only."""
    if not options.visualdl or options.evaluate_only:
        return False
    return world.rank == 0


def main() -> None:
    """Run this rank, or start the ranks of ``--launcher spawn``."""
    options = parse(sys.argv[1:])
    world = env.detect()
    if options.launcher == "spawn" and world.launcher == "none":
        spawn(main, options)  # this process is not a rank, so it has no Run
        return
    run = Run(APP, options, world, Watchdog(), datasets.resolve)
    check_gpus(options, world.local_world_size, world.local_rank or 0)
    if options.visualdl and options.run_dir and writes_scalars(options, world):
        check_folder(options.visualdl, options.run_dir)  # before the rendezvous, in which other ranks would wait
    device = distributed.choose_device(options.device, options.gpus, world)
    with run.monitor.collective("rendezvous"):
        distributed.rendezvous(world, device, options.timeout, options.api)  # collective
    train(run, options, device)
    run.report("paddle", paddle.__version__, distributed.backend(device), device, api=options.api)


if __name__ == "__main__":
    log.run(main)
