"""Train a small CNN on MNIST with PyTorch DistributedDataParallel.

    bash scripts/run_mnist_ddp.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/mnist_ddp/train.py
    python apps/mnist_ddp/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/mnist_ddp/train.py   # one on each machine

Every rank runs this file. They talk at six places, each marked "ranks talk": once to agree on where to start, at each
step for the gradients (in backward), at each log line for the loss, at each evaluation, when a checkpoint is due (with
the log line), and at the end to make sure that all hold the same weights.
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Split, load
from model import Rows, build_model, load_model, load_optimizer, model_arrays, optimizer_arrays
from options import parse
from ranks import backend, meet, settle_buckets
from samestep import FatalError, UserError, checkpoint, env, log
from samestep.checkpoint import Arrays
from samestep.launch import settle
from samestep.options import arithmetic
from samestep.sharding import GlobalBatches, part, step_seed
from samestep.watchdog import Watchdog
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

APP = "mnist_ddp"
EVALUATION_BATCH = 1000  # images at a time; of no influence on the result


def build_optimizer(options: Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, rows: Rows
) -> Tensor:
    """One update with this rank's part of a global batch, ``rows`` of it; returns the part's summed loss.

    The gradient must be the mean over the global batch's *samples*, although the parts may differ in size. DDP
    averages over ranks, so each rank's summed loss is scaled by world_size / rows.global_size. A rank without samples
    takes part with a gradient of zeros.
    """
    optimizer.zero_grad()
    loss_sum = F.nll_loss(model(images, rows), labels, reduction="sum")
    (loss_sum * (dist.get_world_size() / rows.global_size)).backward()  # ranks talk: DDP adds up the gradients
    optimizer.step()
    return loss_sum.detach()


@torch.inference_mode()
def evaluate(model: nn.Module, test: Split, dtype: torch.dtype, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank."""
    model.eval()
    first, last = part(len(test.labels), dist.get_rank(), dist.get_world_size())
    sums = torch.zeros(3, dtype=torch.float64, device=test.labels.device)
    for begin in range(first, last, EVALUATION_BATCH):
        images, labels = test.batch(np.arange(begin, min(begin + EVALUATION_BATCH, last)), dtype)
        scores = model(images, Rows(0, len(images)))
        sums[0] += F.nll_loss(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
        watchdog.beat()
    model.train()
    dist.all_reduce(sums)  # ranks talk
    loss_sum, correct, examples = sums.tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(options: Namespace, world: env.World, device: torch.device) -> dict[str, Any]:
    """Train, or go on training; returns what the result says beyond what every app's does."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, options.dtype)
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    start, state = agree_on_start(options, bool(world.restart_count), model, optimizer, device)
    log.start(options.run_dir, rank, options.quiet)
    watchdog = Watchdog.start(options.run_dir, world, options.timeout)
    training, test = load(options.dataset, options.data_dir, device)
    batches = GlobalBatches(len(training.labels), options.global_batch_size, options.seed, rank, world_size)
    total = options.epochs * batches.steps_per_epoch
    total = total if options.max_steps is None else min(total, options.max_steps)
    metrics = open_metrics(options, world, device, start) if rank == 0 else None
    log.info(
        f"{options.model} on {options.dataset}: {len(training.labels):,} training and {len(test.labels):,} test "
        f"images, {world_size} ranks on {device.type}, steps {start or 0} to {total}, run dir {options.run_dir}"
    )

    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)  # ranks talk
    settle_buckets(ddp, *training.batch(np.arange(1), dtype))
    epoch_sum = torch.zeros((), dtype=torch.float64, device=device)  # this rank's summed loss in the epoch so far
    if rank == 0:
        epoch_sum += state.get("epoch_loss_sum", 0.0)
    train_loss, tested = state.get("train_loss"), {}
    begun = time.monotonic() - state.get("seconds", 0.0)
    logged_at, logged_samples = time.monotonic(), batches.samples_seen(start or 0)
    bar = log.progress(total, start or 0)
    for step in range(start or 0, total):
        torch.manual_seed(step_seed(options.seed, step))
        images, labels = training.batch(batches.indices(step), dtype)
        loss_sum = train_step(ddp, optimizer, images, labels, Rows(batches.first_row(step), batches.size(step)))
        epoch_sum += loss_sum
        done = step + 1
        watchdog.beat(done)
        bar.update()

        epoch_ends = done % batches.steps_per_epoch == 0
        saves = epoch_ends or done == total or (options.checkpoint_every and done % options.checkpoint_every == 0)
        if not saves and done % options.log_every:
            continue
        sums = torch.stack([loss_sum.double(), epoch_sum])
        dist.all_reduce(sums)  # ranks talk
        loss, epoch_loss_sum = sums[0].item() / batches.size(step), sums[1].item()
        if not math.isfinite(loss):
            raise FatalError(f"the loss is {loss} at step {done}: lower --lr, now {options.lr}")
        epoch, samples_seen = batches.epoch(step), batches.samples_seen(done)
        train_loss = epoch_loss_sum / (samples_seen - epoch * batches.n)
        tested = evaluate(model, test, dtype, watchdog) if epoch_ends else {}
        if epoch_ends:
            epoch_loss_sum = 0.0
            epoch_sum.zero_()
            log.info(
                f"epoch {epoch + 1}/{options.epochs}  step {done}  train loss {train_loss:.4f}  "
                f"test loss {tested['test_loss']:.4f}  test accuracy {tested['test_accuracy']:.4f}"
            )
        if metrics:
            speed = (samples_seen - logged_samples) / (time.monotonic() - logged_at)
            logged_at, logged_samples = time.monotonic(), samples_seen
            values = {"step": done, "epoch": epoch, "samples_seen": samples_seen, "loss": loss}
            metrics.write(**values, samples_per_second=round(speed, 1), **tested)
        if metrics and saves:
            metrics.sync()
            state |= {"epoch_loss_sum": epoch_loss_sum, "train_loss": train_loss, "seconds": time.monotonic() - begun}
            groups = {"model": model_arrays(model), "optimizer": optimizer_arrays(model, optimizer)}
            checkpoint.save(options.run_dir, APP, done, groups, state, arithmetic(options), options.keep_checkpoints)
    bar.close()

    tested = tested or evaluate(model, test, dtype, watchdog)
    seconds, samples = time.monotonic() - begun, batches.samples_seen(max(total, start or 0))
    weights = model_arrays(model)
    sha256 = agree_on_weights(weights, device)
    if rank == 0:
        checkpoint.save_weights(options.run_dir / "model.safetensors", weights)
    return {
        "framework": "torch",
        "framework_version": torch.__version__,
        "backend": backend(device),
        "device": device.type,
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
    options: Namespace, restarted: bool, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[int | None, dict[str, Any]]:
    """Rank 0 settles run dir and data set and reads the checkpoint or --init-from; all ranks take them over.

    Returns the step to go on from (None: a new run) and the checkpoint's state. Only the optimizer's state is sent
    here: the weights follow when the model is distributed.
    """
    said: dict[str, Any] = {}
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            settled = settle(APP, options, fresh=not restarted)
            found, options.run_dir = settled.checkpoint, settled.run_dir
            if found:
                load_checkpoint(found, model, optimizer)
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
    said = broadcast_json(said, device)  # ranks talk
    if problem:
        raise problem
    if "exit_code" in said:  # rank 0 says why
        os._exit(said["exit_code"])
    load_optimizer(model, optimizer, broadcast_arrays(optimizer_arrays(model, optimizer), device))  # ranks talk
    options.run_dir, options.dataset = Path(said["run_dir"]), said["dataset"]
    return said["step"], said["state"]


def load_checkpoint(found: checkpoint.Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    try:
        load_model(model, found.arrays("model"))
        load_optimizer(model, optimizer, found.arrays("optimizer"))
    except ValueError as problem:
        raise FatalError(f"checkpoint {found.folder} does not fit the model: {problem}") from problem


def load_initial(path: Path, model: nn.Module) -> None:
    try:
        load_model(model, checkpoint.load_weights(path))
    except ValueError as problem:
        raise UserError(f"--init-from {path} does not fit the model: {problem}") from problem


def agree_on_weights(weights: Arrays, device: torch.device) -> str:
    """The SHA-256 of the weights, which must be the same on every rank. Raises FatalError where it is not."""
    mine = checkpoint.weights_sha256(weights)
    digest = torch.tensor(list(bytes.fromhex(mine)), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)  # ranks talk
    differing = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if differing:
        raise FatalError(f"ranks {differing} ended with other weights than rank 0: this run's result is worthless")
    return mine


def broadcast_json(value: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Rank 0's ``value`` on every rank; as JSON, because a broadcast of objects would unpickle them."""
    content = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, src=0)  # ranks talk
    if dist.get_rank() != 0:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=0)  # ranks talk
    received: dict[str, Any] = json.loads(bytes(content.tolist()))
    return received


def broadcast_arrays(arrays: Arrays, device: torch.device) -> Arrays:
    """Rank 0's arrays on every rank."""
    known = [(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
    received = {}
    for name, shape, dtype in broadcast_json({"arrays": known}, device)["arrays"]:
        mine = arrays[name] if dist.get_rank() == 0 else np.empty(shape, dtype)
        tensor = torch.from_numpy(mine).to(device)
        dist.broadcast(tensor, src=0)  # ranks talk
        received[name] = tensor.cpu().numpy()
    return received


def choose_device(wanted: str, world: env.World) -> torch.device:
    """The CPU, or this rank's own GPU. Raises UserError when ``cuda`` is asked for and ranks would share GPUs."""
    gpus, ranks = torch.cuda.device_count(), world.local_world_size or 1
    if wanted == "cuda" and gpus < ranks:
        raise UserError(
            f"--device cuda: this machine has {gpus} GPUs for {ranks} ranks: start fewer, or use --device cpu"
        )
    if wanted == "cpu" or gpus < ranks:
        return torch.device("cpu")
    torch.backends.cudnn.deterministic = True  # a resumed run must end with the same bits
    device = torch.device("cuda", world.local_rank or 0)
    torch.cuda.set_device(device)
    return device


def open_metrics(options: Namespace, world: env.World, device: torch.device, start: int | None) -> log.Metrics:
    """Rank 0's metrics.jsonl, with the header that says what made its numbers."""
    facts = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "backend": backend(device),
        "threads": torch.get_num_threads(),
    }
    return log.Metrics(options.run_dir, log.header(APP, options, world, **facts), start)


def main() -> None:
    options = parse(sys.argv[1:])
    world = env.detect(os.environ)
    rank = world.rank
    if options.run_dir:  # the launch script fixes it; under a bare launcher rank 0 will
        log.start(options.run_dir, rank, options.quiet)
        Watchdog.start(options.run_dir, world, options.timeout)
    device = choose_device(options.device, world)
    meet(world, device, options.timeout)  # ranks talk
    result = train(options, world, device)
    dist.destroy_process_group()
    if rank == 0:
        log.result(options.run_dir, APP, options, world, **result)


if __name__ == "__main__":
    log.run(main)
