"""Measure samples per second of PaddlePaddle's tutorial program, or the compute limit of lenet_paddle.

paddle.distributed.launch starts this program.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import common
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F


def textbook(options: argparse.Namespace) -> None:
    """Time paddle.Model.fit on images that ToTensor converts one at a time."""
    from paddle.vision.transforms import ToTensor

    world_size = int(os.environ["PADDLE_TRAINERS_NUM"])
    raw = options.data / "MNIST" / "raw"
    files = [str(raw / f"train-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    dataset = paddle.vision.datasets.MNIST(*files, mode="train", transform=ToTensor())
    model = paddle.Model(paddle.vision.models.LeNet())
    model.prepare(
        paddle.optimizer.Adam(learning_rate=0.001, parameters=model.parameters()),
        paddle.nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(topk=(1, 2)),
    )
    clock = common.Clock(options, int(os.environ["PADDLE_TRAINER_ID"]))

    def on_train_batch_end(step: int, logs: dict[str, Any] | None = None) -> None:
        if clock.step():
            model.stop_training = True

    callback = paddle.callbacks.Callback()
    callback.on_train_batch_end = on_train_batch_end
    model.fit(
        dataset,
        epochs=1,
        batch_size=options.batch // world_size,
        num_iters=options.warm_up + options.steps,
        num_workers=options.workers,
        verbose=0,
        callbacks=[callback],
    )


def limit(options: argparse.Namespace) -> None:
    """Time training steps of the app on its first batches in memory, without sampling or logs."""
    app = Path(__file__).resolve().parents[2] / "apps" / "lenet_paddle"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import load
    from distributed import distribute
    from model import build_model
    from options import parse
    from samestep.sharding import GlobalBatches
    from train import build_optimizer

    if int(os.environ["PADDLE_TRAINERS_NUM"]) > 1:
        dist.init_parallel_env()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    app_options = parse([])
    train_set, _ = load("mnist", options.data)
    batches = GlobalBatches(len(train_set.labels), options.batch, app_options.seed, rank, world_size)
    steps = range(common.RESIDENT)
    shards = [(*train_set.batch(batches.indices(step), "float32"), batches.size(step)) for step in steps]
    model = build_model("float32", app_options.seed)
    parallel, optimizer = distribute("basic", model, build_optimizer(app_options, model))
    clock = common.Clock(options, rank)
    for images, labels, global_size in itertools.cycle(shards):
        scores = parallel(images)
        loss_sum = F.cross_entropy(scores, labels, reduction="sum")
        (loss_sum * (world_size / global_size)).backward()
        optimizer.step()
        optimizer.clear_grad()
        (scores.argmax(axis=1) == labels).sum()  # the app counts correct predictions
        if clock.step():
            break


def main() -> None:
    options = common.arguments()
    if options.kind == "textbook":
        textbook(options)
    else:
        limit(options)
    os._exit(0)  # Paddle's gloo threads may abort a normal exit


if __name__ == "__main__":
    main()
