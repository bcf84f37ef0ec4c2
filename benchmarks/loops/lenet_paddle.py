"""PaddlePaddle: the program of its tutorials, and the compute limit. Started by paddle.distributed.launch."""

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


def textbook(options: argparse.Namespace) -> None:
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
    its_clock = common.Clock(options, int(os.environ["PADDLE_TRAINER_ID"]))

    def on_train_batch_end(step: int, logs: dict[str, Any] | None = None) -> None:
        if its_clock.step():
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
    """The app's own model, optimizer and step, fed its own first batches, made before; nothing is sampled or logged."""
    app = Path(__file__).resolve().parents[2] / "apps" / "lenet_paddle"
    sys.path[:0] = [str(app), str(app.parents[1] / "core")]
    from data import load
    from model import build_model
    from options import parse
    from ranks import distribute
    from samestep.phases import Phases
    from samestep.sharding import GlobalBatches
    from train import build_optimizer, train_step

    if int(os.environ["PADDLE_TRAINERS_NUM"]) > 1:
        dist.init_parallel_env()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    its = parse([])
    training, _ = load("mnist", options.data)
    batches = GlobalBatches(len(training.labels), options.batch, its.seed, rank, world_size)
    steps = range(common.RESIDENT)
    shards = [(*training.batch(batches.indices(step), "float32"), batches.rows(step)) for step in steps]
    model = build_model("float32", its.seed)
    parallel, optimizer = distribute("basic", model, build_optimizer(its, model))
    its_clock, phases = common.Clock(options, rank), Phases()
    for images, labels, rows in itertools.cycle(shards):
        train_step(parallel, optimizer, images, labels, rows, phases)
        if its_clock.step():
            break


def main() -> None:
    options = common.arguments()
    if options.kind == "textbook":
        textbook(options)
    else:
        limit(options)
    os._exit(0)  # Paddle's gloo threads may abort an orderly end


if __name__ == "__main__":
    main()
