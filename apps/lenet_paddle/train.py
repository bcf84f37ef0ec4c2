"""Train LeNet on MNIST with PaddlePaddle.

    bash scripts/run_lenet_paddle.sh 4                       # does all the set-up, restarts after a failure
    python -m paddle.distributed.launch --nproc_per_node 4 apps/lenet_paddle/train.py      # fleetrun is the same
    python apps/lenet_paddle/train.py --launcher spawn --nprocs 4
    python apps/lenet_paddle/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/lenet_paddle/train.py   # one on each machine

Every rank runs this file. They talk at six places, each marked "ranks talk": once to agree on where to start, at each
step for the gradients (in backward), at each log line for the loss, at each evaluation, when a checkpoint is due (with
the log line), and at the end to make sure that all hold the same weights.

--api chooses among Paddle's ways to say this: `basic` and `fleet` differ in ranks.py alone, `highlevel` (highlevel.py)
leaves the loop to paddle.Model. All three take the same steps.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from data import Split, load
from highlevel import Batches, HighLevel
from model import build_model, load_model, load_optimizer, model_arrays, optimizer_arrays
from options import parse
from paddle import Tensor, nn
from paddle.optimizer import Optimizer
from ranks import all_gather, all_reduce, backend, broadcast, distribute, meet, settle_buckets
from samestep import FatalError, UserError, checkpoint, env, log
from samestep.checkpoint import Arrays
from samestep.launch import settle
from samestep.options import arithmetic
from samestep.sharding import GlobalBatches, part, step_seed
from samestep.watchdog import Watchdog

APP = "lenet_paddle"
EVALUATION_BATCH = 1000  # images at a time; of no influence on the result


def build_optimizer(options: Namespace, model: nn.Layer) -> Optimizer:
    if options.optimizer == "adam":  # epsilon is placed as in PyTorch's: beside the root of the corrected moment
        return paddle.optimizer.Adam(options.lr, parameters=model.parameters())
    return paddle.optimizer.Momentum(options.lr, options.momentum, parameters=model.parameters())


def train_step(model: nn.Layer, optimizer: Optimizer, images: Tensor, labels: Tensor, global_size: int) -> Tensor:
    """One update with this rank's part of a global batch of ``global_size``; returns the part's summed loss.

    The gradient must be the mean over the global batch's *samples*, although the parts may differ in size.
    DataParallel averages over ranks, so each rank's summed loss is scaled by world_size / global_size. A rank without
    samples takes part with a gradient of zeros.
    """
    loss_sum = F.cross_entropy(model(images), labels, reduction="sum")
    (loss_sum * (dist.get_world_size() / global_size)).backward()  # ranks talk: DataParallel adds up the gradients
    optimizer.step()
    optimizer.clear_grad()
    return loss_sum.detach()


@paddle.no_grad()  # type: ignore[untyped-decorator]
def evaluate(model: nn.Layer, test: Split, dtype: str, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank.

    Accuracy is the share of images whose label has the highest score; ``test_accuracy_top2``, that whose label is
    among the two highest.
    """
    model.eval()
    first, last = part(len(test.labels), dist.get_rank(), dist.get_world_size())
    sums = paddle.zeros([4], dtype="float64")
    for begin in range(first, last, EVALUATION_BATCH):
        images, labels = test.batch(np.arange(begin, min(begin + EVALUATION_BATCH, last)), dtype)
        scores = model(images)
        hits = (paddle.topk(scores, 2)[1] == labels.unsqueeze(1)).astype("float64").sum(axis=0)
        loss_sum = F.cross_entropy(scores, labels, reduction="sum").astype("float64")
        sums += paddle.stack([loss_sum, hits[0], hits.sum(), paddle.to_tensor(len(labels), dtype="float64")])
        watchdog.beat()
    model.train()
    all_reduce(sums)  # ranks talk
    loss_sum, correct, within_two, examples = sums.tolist()
    return {
        "test_loss": loss_sum / examples,
        "test_accuracy": correct / examples,
        "test_accuracy_top2": within_two / examples,
        "test_examples": int(examples),
    }


def train(options: Namespace, world: env.World, device: str) -> dict[str, Any]:
    """Train, or go on training; returns what the result says beyond what every app's does."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = options.dtype
    model = build_model(dtype, options.seed)
    optimizer = build_optimizer(options, model)
    start, state = agree_on_start(options, bool(world.restart_count), model, optimizer)
    log.start(options.run_dir, rank, options.quiet)
    watchdog = Watchdog.start(options.run_dir, world, options.timeout)
    training, test = load(options.dataset, options.data_dir)
    batches = GlobalBatches(len(training.labels), options.global_batch_size, options.seed, rank, world_size)
    total = options.epochs * batches.steps_per_epoch
    total = total if options.max_steps is None else min(total, options.max_steps)
    metrics = open_metrics(options, world, device, start) if rank == 0 else None
    scalars = open_scalars(options) if rank == 0 and options.visualdl else None
    log.info(
        f"lenet on {options.dataset}: {len(training.labels):,} training and {len(test.labels):,} test images, "
        f"{world_size} ranks on {device}, steps {start or 0} to {total}, run dir {options.run_dir}"
    )

    sample = training.batch(np.arange(1), dtype)
    high = HighLevel(model, optimizer, sample) if options.api == "highlevel" else None  # ranks talk
    epoch_sum = paddle.zeros([], dtype="float64")  # this rank's summed loss in the epoch so far
    if rank == 0:
        epoch_sum += state.get("epoch_loss_sum", 0.0)
    train_loss, tested = state.get("train_loss"), {}
    begun = time.monotonic() - state.get("seconds", 0.0)
    logged_at, logged_samples = time.monotonic(), batches.samples_seen(start or 0)
    bar = log.progress(total, start or 0)

    def test_now() -> dict[str, Any]:
        found: dict[str, Any] = high.evaluate(test, EVALUATION_BATCH, dtype, watchdog) if high else {}
        return found or evaluate(model, test, dtype, watchdog)

    def record(step: int, loss_sum: Tensor) -> None:
        """What is due after update ``step``, of which this rank's part had the loss ``loss_sum``."""
        nonlocal train_loss, tested, logged_at, logged_samples, state
        epoch_sum.add_(loss_sum.astype("float64"))
        done = step + 1
        watchdog.beat(done)
        bar.update()

        epoch_ends = done % batches.steps_per_epoch == 0
        saves = epoch_ends or done == total or (options.checkpoint_every and done % options.checkpoint_every == 0)
        if not saves and done % options.log_every:
            return
        sums = paddle.stack([loss_sum.astype("float64"), epoch_sum])
        all_reduce(sums)  # ranks talk
        loss, epoch_loss_sum = sums[0].item() / batches.size(step), sums[1].item()
        if not math.isfinite(loss):
            raise FatalError(f"the loss is {loss} at step {done}: lower --lr, now {options.lr}")
        epoch, samples_seen = batches.epoch(step), batches.samples_seen(done)
        train_loss = epoch_loss_sum / (samples_seen - epoch * batches.n)
        tested = test_now() if epoch_ends else {}
        if epoch_ends:
            epoch_loss_sum = 0.0
            epoch_sum.zero_()
            log.info(
                f"epoch {epoch + 1}/{options.epochs}  step {done}  train loss {train_loss:.4f}  "
                f"test loss {tested['test_loss']:.4f}  test accuracy {tested['test_accuracy']:.4f}  "
                f"top-2 {tested['test_accuracy_top2']:.4f}"
            )
        if metrics:
            speed = (samples_seen - logged_samples) / (time.monotonic() - logged_at)
            logged_at, logged_samples = time.monotonic(), samples_seen
            values = {"step": done, "epoch": epoch, "samples_seen": samples_seen, "loss": loss}
            values |= {"samples_per_second": round(speed, 1), **tested}
            metrics.write(**values)
            if scalars:
                scalars.write(values)
        if metrics and saves:
            metrics.sync()
            state |= {"epoch_loss_sum": epoch_loss_sum, "train_loss": train_loss, "seconds": time.monotonic() - begun}
            groups = {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}
            checkpoint.save(options.run_dir, APP, done, groups, state, arithmetic(options), options.keep_checkpoints)

    if high:
        high.fit(Batches(training, batches, dtype, start or 0, total), options.epochs, record)
    else:
        parallel, its_optimizer = distribute(options.api, model, optimizer)  # ranks talk
        settle_buckets(parallel, *sample)
        for step in range(start or 0, total):
            paddle.seed(step_seed(options.seed, step))
            images, labels = training.batch(batches.indices(step), dtype)
            record(step, train_step(parallel, its_optimizer, images, labels, batches.size(step)))
    bar.close()
    if scalars:
        scalars.close()

    tested = tested or test_now()
    seconds, samples = time.monotonic() - begun, batches.samples_seen(max(total, start or 0))
    weights = model_arrays(model)
    sha256 = agree_on_weights(weights)
    if rank == 0:
        checkpoint.save_weights(options.run_dir / "model.safetensors", weights)
    return {
        "framework": "paddle",
        "framework_version": paddle.__version__,
        "backend": backend(device),
        "device": device,
        "api": options.api,
        "train_examples": batches.n,
        "steps": max(total, start or 0),
        "train_loss": train_loss,
        **tested,
        "seconds": round(seconds, 3),
        "samples_per_second": round(samples / seconds, 1),
        "resumed_from_step": start,
        "weights_sha256": sha256,
    }


def agree_on_start(
    options: Namespace, restarted: bool, model: nn.Layer, optimizer: Optimizer
) -> tuple[int | None, dict[str, Any]]:
    """Rank 0 settles run dir and data set and reads the checkpoint or --init-from; all ranks take them over.

    Returns the step to go on from (None: a new run) and the checkpoint's state. Only the optimizer's state is sent
    here: the weights follow when the model is distributed.
    """
    said: dict[str, Any] = {}
    accumulated: Arrays = {}
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            settled = settle(APP, options, fresh=not restarted)
            found, options.run_dir = settled.checkpoint, settled.run_dir
            if found:
                accumulated = load_checkpoint(found, model, optimizer)
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
    said = broadcast_json(said)  # ranks talk
    if problem:
        raise problem
    if "exit_code" in said:  # rank 0 says why
        os._exit(said["exit_code"])
    load_optimizer(model, optimizer, broadcast_arrays(accumulated))  # ranks talk
    options.run_dir, options.dataset = Path(said["run_dir"]), said["dataset"]
    return said["step"], said["state"]


def load_checkpoint(found: checkpoint.Checkpoint, model: nn.Layer, optimizer: Optimizer) -> Arrays:
    """Load a checkpoint's weights and optimizer state; returns the latter, for the other ranks."""
    try:
        load_model(model, found.arrays("model"))
        load_optimizer(model, optimizer, found.arrays("optimizer"))
    except ValueError as problem:
        raise FatalError(f"checkpoint {found.folder} does not fit the model: {problem}") from problem
    return found.arrays("optimizer")


def load_initial(path: Path, model: nn.Layer) -> None:
    try:
        load_model(model, checkpoint.load_weights(path))
    except ValueError as problem:
        raise UserError(f"--init-from {path} does not fit the model: {problem}") from problem


def agree_on_weights(weights: Arrays) -> str:
    """The SHA-256 of the weights, which must be the same on every rank. Raises FatalError where it is not."""
    mine = checkpoint.weights_sha256(weights)
    digests = all_gather(paddle.to_tensor(list(bytes.fromhex(mine)), dtype="uint8"))  # ranks talk
    differing = [rank for rank, other in enumerate(digests) if other.tolist() != digests[0].tolist()]
    if differing:
        raise FatalError(f"ranks {differing} ended with other weights than rank 0: this run's result is worthless")
    return mine


def broadcast_json(value: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's ``value`` on every rank; as JSON, because a broadcast of objects would unpickle them."""
    content = paddle.to_tensor(list(json.dumps(value).encode()), dtype="uint8")
    length = paddle.to_tensor([len(content)])
    broadcast(length)  # ranks talk
    if dist.get_rank() != 0:
        content = paddle.empty([length.item()], dtype="uint8")
    broadcast(content)  # ranks talk
    received: dict[str, Any] = json.loads(bytes(content.tolist()))
    return received


def broadcast_arrays(arrays: Arrays) -> Arrays:
    """Rank 0's arrays on every rank."""
    known = [(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
    received = {}
    for name, shape, dtype in broadcast_json({"arrays": known})["arrays"]:
        tensor = paddle.to_tensor(arrays[name] if dist.get_rank() == 0 else np.empty(shape, dtype))
        broadcast(tensor)  # ranks talk
        received[name] = tensor.numpy()
    return received


def choose_device(wanted: str, world: env.World) -> str:
    """The CPU, or this rank's own GPU. Raises UserError when ``gpu`` is asked for and ranks would share GPUs."""
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    ranks = world.local_world_size or 1
    if wanted == "gpu" and gpus < ranks:
        raise UserError(
            f"--device gpu: this machine has {gpus} GPUs for {ranks} ranks"
            f"{'' if gpus or paddle.is_compiled_with_cuda() else ' (this Paddle is the CPU build)'}: "
            "start fewer, or use --device cpu"
        )
    if wanted == "cpu" or gpus < ranks:
        paddle.set_device("cpu")
        return "cpu"
    paddle.set_flags({"FLAGS_cudnn_deterministic": True})  # a resumed run must end with the same bits
    paddle.set_device(f"gpu:{dist.ParallelEnv().device_id}")  # which Paddle's launcher chose
    return "gpu"


def open_metrics(options: Namespace, world: env.World, device: str, start: int | None) -> log.Metrics:
    """Rank 0's metrics.jsonl, with the header that says what made its numbers."""
    facts = {
        "paddle": paddle.__version__,
        "cuda": paddle.version.cuda(),
        "device": paddle.device.cuda.get_device_name() if device == "gpu" else platform.processor() or "cpu",
        "backend": backend(device),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0)),
    }
    return log.Metrics(options.run_dir, log.header(APP, options, world, **facts), start)


def open_scalars(options: Namespace) -> Any:
    from visual import Scalars  # VisualDL takes a second to import

    return Scalars(options.visualdl, options.run_dir)


def run_rank() -> None:
    """What every rank runs, whoever started it."""
    options = parse(sys.argv[1:])
    world = env.detect(os.environ)
    rank = world.rank
    if options.run_dir:  # the launch script fixes it; under a bare launcher rank 0 will
        log.start(options.run_dir, rank, options.quiet)
        Watchdog.start(options.run_dir, world, options.timeout)
    device = choose_device(options.device, world)
    meet(options.api, world, device, options.timeout)  # ranks talk
    result = train(options, world, device)
    if rank == 0:
        log.result(options.run_dir, APP, options, world, **result)


def spawn(options: Namespace) -> None:
    """Start the ranks from here, and end as they end."""
    nprocs = options.nprocs or 1
    settings = {"gpus": options.gpus} if options.gpus else {"backend": "gloo"} if options.device == "cpu" else {}
    job = dist.spawn(run_rank_and_exit, nprocs=nprocs, join=False, **settings)
    try:
        while not job.join():
            pass
    except Exception:  # Paddle's word for a rank that failed; the rank itself has said why
        codes = {process.exitcode for process in job.processes}
        os._exit(2 if 2 in codes else 1)


def run_rank_and_exit() -> None:
    log.run(run_rank)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.launcher == "spawn" and env.detect(os.environ).launcher == "none":
        spawn(options)
    else:
        run_rank()


if __name__ == "__main__":
    log.run(main)
