"""Train ResNet on CIFAR-10 with MindSpore.

    bash scripts/run_resnet50_mindspore.sh 2              # does all the set-up, restarts after a failure
    msrun --worker_num=2 --local_worker_num=2 --join=True apps/resnet50_mindspore/train.py
    python apps/resnet50_mindspore/train.py               # one process

Every rank runs this file, and so does msrun's scheduler, which only brings them together. They talk at six places,
each marked "ranks talk": once to agree on where to start, at each step for the gradients, at each log line for the
loss, at each evaluation, when a checkpoint is due (with the log line, and for the running statistics of batch
normalisation), and at the end to make sure that all hold the same weights.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import safetensors.numpy
from data import Split, load
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel
from model import (
    ResNet,
    buffers,
    build_loss,
    build_model,
    load_buffers,
    load_model,
    load_optimizer,
    model_arrays,
    optimizer_arrays,
)
from options import parse
from ranks import all_gather, backend, broadcast, meet, serve
from samestep import FatalError, UserError, checkpoint, env, log
from samestep.checkpoint import Arrays
from samestep.launch import settle
from samestep.options import arithmetic
from samestep.sharding import GlobalBatches, part
from samestep.watchdog import Watchdog

APP = "resnet50_mindspore"
EVALUATION_BATCH = 64  # images at a time; of no influence on the result


def build_optimizer(options: Namespace, model: ResNet) -> nn.Momentum:
    return nn.Momentum(model.trainable_params(), options.lr, options.momentum)


class Forward(nn.Cell):  # type: ignore[misc]
    """Images, labels and weights of one batch to the mean of weight * loss."""

    def __init__(self, model: ResNet, loss: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.loss = model, loss

    def construct(self, images: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (self.loss(self.model(images), labels) * weights).mean()


class TrainStep(nn.Cell):  # type: ignore[misc]
    """One update with this rank's part of a global batch, compiled into one graph; returns the mean of weight * loss.

    The gradient must be the mean over the global batch's *samples*, although the parts may differ in size. MindSpore
    averages over ranks (gradients_mean), so the weights scale each sample; rows that only fill up a part have weight 0.
    """

    def __init__(self, forward: Forward, optimizer: nn.Momentum, parallel: str, world_size: int) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        self.optimizer, self.reduces = optimizer, parallel == "data" and world_size > 1
        if self.reduces:  # otherwise MindSpore places the collectives itself, where it cuts the operators
            self.reduce = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=world_size)

    def construct(self, images: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        loss, gradients = self.gradients(images, labels, weights)
        if self.reduces:
            gradients = self.reduce(gradients)  # ranks talk
        self.optimizer(gradients)
        return loss


def build_step(options: Namespace, model: ResNet, optimizer: nn.Momentum, world_size: int) -> nn.Cell:
    """The graph that trains, cut by MindSpore where --parallel says so."""
    step = TrainStep(Forward(model, build_loss(options.loss)), optimizer, options.parallel, world_size)
    if options.parallel == "data":
        return step
    cut = AutoParallel(step, "semi_auto" if options.parallel == "semi-auto" else "recursive_programming")
    cut.enable_gradients_mean()
    return cut


def evaluate(model: ResNet, test: Split, image_size: int, world: env.World, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank."""
    mine = buffers(model)
    load_buffers(model, averaged_buffers(model, world.world_size)[0])  # ranks talk
    model.set_train(False)
    first, last = part(len(test.labels), world.rank, world.world_size)
    sums = np.zeros(3)
    batches = test.evaluation(first, last, EVALUATION_BATCH, image_size)
    for images, labels, weights in batches.create_tuple_iterator(num_epochs=1):
        counted = weights.asnumpy() > 0
        logits = model(images).asnumpy()[counted].astype(np.float64)
        wanted = labels.asnumpy()[counted]
        logits -= logits.max(axis=1, keepdims=True)
        sums[0] += (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(wanted)), wanted]).sum()
        sums[1] += (logits.argmax(axis=1) == wanted).sum()
        sums[2] += len(wanted)
        watchdog.beat()
    model.set_train(True)
    load_buffers(model, mine)
    loss_sum, correct, examples = all_gather(sums, world.world_size).sum(axis=0)  # ranks talk
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(options: Namespace, world: env.World) -> dict[str, Any]:
    """Train, or go on training; returns what the result says beyond what every app's does."""
    rank, world_size = world.rank, world.world_size
    model = build_model(options.depth, options.freeze_bn, options.seed)
    model.set_train(True)
    optimizer = build_optimizer(options, model)
    start, state = agree_on_start(options, world, model, optimizer)
    log.start(options.run_dir, rank, options.quiet)
    watchdog = Watchdog.start(options.run_dir, world, options.timeout)
    watchdog.beat(start)
    training, test = load(options.dataset, options.data_dir)
    batches = GlobalBatches(len(training.labels), options.global_batch_size, options.seed, rank, world_size)
    total = options.epochs * batches.steps_per_epoch
    total = total if options.max_steps is None else min(total, options.max_steps)
    metrics = open_metrics(options, world, start) if rank == 0 else None
    log.info(
        f"ResNet-{options.depth} on {options.dataset}: {len(training.labels):,} training and {len(test.labels):,} test "
        f"images, {world_size} ranks on {options.device}, steps {start or 0} to {total}, run dir {options.run_dir}"
    )

    step_graph = build_step(options, model, optimizer, world_size)
    fed = training.training(batches, range(start or 0, total), options.image_size)
    train_step = feed(step_graph, fed, options.device)
    epoch_sum = state.get("epoch_loss_sum", 0.0) if rank == 0 else 0.0  # this rank's summed loss in the epoch so far
    unread: list[tuple[Tensor, int]] = []  # losses that may still be being computed, and the size of their batch
    train_loss, tested = state.get("train_loss"), {}
    begun = time.monotonic() - state.get("seconds", 0.0)
    logged_at, logged_samples = time.monotonic(), batches.samples_seen(start or 0)
    bar = log.progress(total, start or 0)
    for step in range(start or 0, total):
        unread.append((train_step(), batches.size(step)))
        model.batches_tracked += not options.freeze_bn
        done = step + 1
        watchdog.beat(done)
        bar.update()

        epoch_ends = done % batches.steps_per_epoch == 0
        saves = epoch_ends or done == total or (options.checkpoint_every and done % options.checkpoint_every == 0)
        if not saves and done % options.log_every:
            continue
        loss_sums = [float(loss.asnumpy()) * size / world_size for loss, size in unread]
        unread.clear()
        epoch_sum += sum(loss_sums)
        sums = all_gather(np.array([loss_sums[-1], epoch_sum]), world_size).sum(axis=0)  # ranks talk
        loss, epoch_loss_sum = float(sums[0]) / batches.size(step), float(sums[1])
        if not math.isfinite(loss):
            raise FatalError(f"the loss is {loss} at step {done}: lower --lr, now {options.lr}")
        epoch, samples_seen = batches.epoch(step), batches.samples_seen(done)
        train_loss = epoch_loss_sum / (samples_seen - epoch * batches.n)
        tested = evaluate(model, test, options.image_size, world, watchdog) if epoch_ends else {}
        if epoch_ends:
            epoch_loss_sum = epoch_sum = 0.0
            log.info(
                f"epoch {epoch + 1}/{options.epochs}  step {done}  train loss {train_loss:.4f}  "
                f"test loss {tested['test_loss']:.4f}  test accuracy {tested['test_accuracy']:.4f}"
            )
        if metrics:
            speed = (samples_seen - logged_samples) / (time.monotonic() - logged_at)
            logged_at, logged_samples = time.monotonic(), samples_seen
            values = {"step": done, "epoch": epoch, "samples_seen": samples_seen, "loss": loss}
            metrics.write(**values, samples_per_second=round(speed, 1), **tested)
        if saves:
            average, each = averaged_buffers(model, world_size)  # ranks talk
        if metrics and saves:
            metrics.sync()
            state |= {"epoch_loss_sum": epoch_loss_sum, "train_loss": train_loss, "seconds": time.monotonic() - begun}
            load_buffers(model, average)
            groups = {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}
            load_buffers(model, each[rank])
            groups["buffers"] = {"each": each}
            checkpoint.save(options.run_dir, APP, done, groups, state, arithmetic(options), options.keep_checkpoints)
    bar.close()

    tested = tested or evaluate(model, test, options.image_size, world, watchdog)
    seconds, samples = time.monotonic() - begun, batches.samples_seen(max(total, start or 0))
    load_buffers(model, averaged_buffers(model, world_size)[0])  # ranks talk
    weights = model_arrays(model)
    sha256 = agree_on_weights(weights, world_size)
    if rank == 0:
        checkpoint.save_weights(options.run_dir / "model.safetensors", weights)
    return {
        "framework": "mindspore",
        "framework_version": ms.__version__,
        "backend": backend(options.device),
        "device": options.device,
        "train_examples": batches.n,
        "steps": max(total, start or 0),
        "train_loss": train_loss,
        **tested,
        "seconds": round(seconds, 3),
        "samples_per_second": round(samples / seconds, 1),
        "resumed_from_step": start,
        "weights_sha256": sha256,
    }


def feed(step: nn.Cell, fed: Any, device: str) -> Callable[[], Tensor]:
    """One update with the pipeline's next batch at each call. On Ascend the batches wait on the device ("sinking")."""
    if device == "ascend":
        sinking: Callable[[], Tensor] = ms.data_sink(step, fed)
        return sinking
    batches = fed.create_tuple_iterator(num_epochs=1)
    return lambda: step(*next(batches))


def averaged_buffers(model: ResNet, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The running statistics averaged over ranks [k], and each rank's [world_size, k].

    A rank goes on with its own, so that what they end as does not depend on how often this was done.
    """
    each = all_gather(buffers(model), world_size)  # ranks talk
    return each.mean(axis=0, dtype=np.float64).astype(np.float32), each


def agree_on_start(
    options: Namespace, world: env.World, model: ResNet, optimizer: nn.Momentum
) -> tuple[int | None, dict[str, Any]]:
    """Rank 0 settles run dir and data set and reads the checkpoint or --init-from; all ranks take them over.

    Returns the step to go on from (None: a new run) and the checkpoint's state.
    """
    said: dict[str, Any] = {}
    own: Arrays = {}
    problem: Exception | None = None
    if world.rank == 0:
        try:
            settled = settle(APP, options, fresh=not world.restart_count)
            found, options.run_dir = settled.checkpoint, settled.run_dir
            if found:
                load_checkpoint(found, model, optimizer)
                own = found.arrays("buffers")
                if options.init_from:
                    log.info(f"{found.folder.name} of the run dir wins over --init-from {options.init_from}")
            elif options.init_from:
                load_initial(options.init_from, model)
            said = {
                "run_dir": str(settled.run_dir),
                "dataset": settled.dataset,
                "step": found.step if found else None,
                "state": {**(found.state if found else {}), "requested_dataset": settled.requested_dataset},
            }
        except (UserError, FatalError) as caught:
            problem, said = caught, {"exit_code": 2 if isinstance(caught, UserError) else 1}
    said = json.loads(broadcast(json.dumps(said).encode(), world.world_size))  # ranks talk
    if problem:
        raise problem
    if "exit_code" in said:  # rank 0 says why
        os._exit(said["exit_code"])
    load_model(model, broadcast_arrays(model_arrays(model), world.world_size))  # ranks talk
    moments = broadcast_arrays(optimizer_arrays(model, optimizer), world.world_size)  # ranks talk
    load_optimizer(model, optimizer, moments)
    each = broadcast_arrays(own, world.world_size).get("each", np.empty(0))  # ranks talk
    if len(each) == world.world_size:  # at another number of ranks each goes on with the average
        load_buffers(model, each[world.rank])
    options.run_dir, options.dataset = Path(said["run_dir"]), said["dataset"]
    return said["step"], said["state"]


def load_checkpoint(found: checkpoint.Checkpoint, model: ResNet, optimizer: nn.Momentum) -> None:
    try:
        load_model(model, found.arrays("model"))
        load_optimizer(model, optimizer, found.arrays("optimizer"))
    except ValueError as problem:
        raise FatalError(f"checkpoint {found.folder} does not fit the model: {problem}") from problem


def load_initial(path: Path, model: ResNet) -> None:
    try:
        load_model(model, checkpoint.load_weights(path))
    except ValueError as problem:
        raise UserError(f"--init-from {path} does not fit the model: {problem}") from problem


def agree_on_weights(weights: Arrays, world_size: int) -> str:
    """The SHA-256 of the weights, which must be the same on every rank. Raises FatalError where it is not."""
    mine = checkpoint.weights_sha256(weights)
    digests = all_gather(np.frombuffer(bytes.fromhex(mine), np.int32), world_size)  # ranks talk
    differing = [rank for rank, other in enumerate(digests) if not np.array_equal(other, digests[0])]
    if differing:
        raise FatalError(f"ranks {differing} ended with other weights than rank 0: this run's result is worthless")
    return mine


def broadcast_arrays(arrays: Arrays, world_size: int) -> Arrays:
    """Rank 0's arrays on every rank."""
    content = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    received: Arrays = safetensors.numpy.load(broadcast(content, world_size))  # ranks talk
    return received


def choose_device(device: str) -> None:
    """The CPU, or this rank's own Ascend card, whose number DEVICE_ID holds."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if device == "ascend":
        ms.set_device("Ascend", int(os.environ.get("DEVICE_ID", "0")))
        return
    # With AVX-512, oneDNN answers MindSpore's plain layout with its reference convolution, a slow loop for checking
    # others; below that, with a matrix product, ten times as fast and more.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    ms.set_device("CPU")
    ms.device_context.cpu.op_tuning.threads_num(threads())  # 25 otherwise, in each rank


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def open_metrics(options: Namespace, world: env.World, start: int | None) -> log.Metrics:
    """Rank 0's metrics.jsonl, with the header that says what made its numbers."""
    facts = {
        "mindspore": ms.__version__,
        "device": options.device if options.device == "ascend" else platform.processor() or "cpu",
        "backend": backend(options.device),
        "threads": threads(),
    }
    return log.Metrics(options.run_dir, log.header(APP, options, world, **facts), start)


def main() -> None:
    options = parse(sys.argv[1:])
    world = env.detect(os.environ)
    # MindSpore gives up after 30 s of silence and names no rank on the console; the watchdog does, and so comes first.
    os.environ.setdefault("MS_NODE_TIMEOUT", str(int(options.timeout) + 60))
    if world.role == "scheduler":
        serve()
    rank = world.rank
    if options.run_dir:  # the launch script fixes it; under a bare launcher rank 0 will
        log.start(options.run_dir, rank, options.quiet)
        Watchdog.start(options.run_dir, world, options.timeout)
    choose_device(options.device)
    meet(world, options.device)  # ranks talk
    result = train(options, world)
    if rank == 0:
        log.result(options.run_dir, APP, options, world, **result)


if __name__ == "__main__":
    log.run(main)
