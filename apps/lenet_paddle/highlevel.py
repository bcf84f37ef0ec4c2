"""Take the same steps by paddle.Model (``--api highlevel``), whose fit and evaluate own the loop."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import distributed
import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from data import EVAL_BATCH_SIZE, Split
from model import count_correct
from paddle import Tensor, nn
from paddle.optimizer import Optimizer
from samestep import log
from samestep.run import Run
from samestep.sharding import GlobalBatches, shard, step_seed
from samestep.step_timer import COMMUNICATION, INPUT

NO_LABEL = -1  # of a row that does not count: paddle.Model allows neither empty batches nor unequal ones


class MeanOverGlobalBatch(nn.Layer):  # type: ignore[misc]
    """Scale cross entropy so that the gradient averaged over ranks is the mean over the global batch's samples.

    ``loss_sum`` and ``correct`` are the summed loss and `count_correct` of this rank's last batch.
    """

    def forward(self, scores: Tensor, labels: Tensor, global_size: Tensor | None = None) -> Tensor:
        """Return the scaled loss; without ``global_size``, the samples in the global batch, the summed loss.

        Args:
            scores: [m, 10].
            labels: int64 [m]; NO_LABEL in rows that do not count.
            global_size: int64 [].
        """
        loss_sum = F.cross_entropy(scores, labels, reduction="sum", ignore_index=NO_LABEL)
        self.loss_sum = loss_sum.detach()
        self.correct = count_correct(scores, labels)
        if global_size is None:
            return loss_sum
        return loss_sum * (dist.get_world_size() / global_size.astype(scores.dtype))


class Shards:
    """Yield this rank's shards of the run's steps, as paddle.Model takes them: images, labels, global batch size."""

    def __init__(self, run: Run, split: Split, batches: GlobalBatches) -> None:
        self._run = run
        self._split = split
        self._batches = batches
        self._steps = range(run.first_step, run.last_step)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        run = self._run
        batches = self._batches
        for step in self._steps:
            with run.timer.phase(INPUT):
                images, labels = self._split.batch(batches.indices(step), run.options.dtype)
                if not len(labels):  # ranks outnumber the samples
                    images = paddle.zeros([1, 1, 28, 28], images.dtype)
                    labels = paddle.full([1], NO_LABEL, "int64")
            paddle.seed(step_seed(batches.seed, step))
            yield images, labels, paddle.to_tensor(batches.size(step))


class LogLines(io.TextIOBase):
    """Log the lines that are printed: rank 0 shows them on the console."""

    def write(self, text: str) -> int:
        """Log the lines of ``text`` that are not blank."""
        for line in filter(str.strip, text.splitlines()):
            log.info(line)
        return len(text)


class HighLevel(paddle.Model):  # type: ignore[misc]
    """Hold the network, its loss and its metrics."""

    def __init__(self, run: Run, network: nn.Layer, optimizer: Optimizer, images: Tensor, labels: Tensor) -> None:
        """Make the model of ``run``; ``images`` [m, 1, 28, 28] and ``labels`` int64 [m] are any samples, m > 0."""
        super().__init__(network)
        self.run = run
        self.loss = MeanOverGlobalBatch()
        self.accuracy = paddle.metric.Accuracy(topk=(1, 2))
        self.prepare(optimizer, self.loss, self.accuracy)  # collective: all ranks get rank 0's weights
        targets = [labels, paddle.to_tensor(1)]
        sample_step = partial(self.train_batch, [images], targets, update=False)
        distributed.fix_reduction_order(network, sample_step)  # collective
        self.accuracy.reset()  # the sample does not count
        distributed.time_gradients(network, run.timer)

    def train_batch(self, *arguments: Any, **settings: Any) -> Any:
        """Do what paddle.Model does, and note that this waits for the other ranks, in C++ inside the backward pass."""
        with self.run.monitor.collective("train_batch"):
            return super().train_batch(*arguments, **settings)  # collective

    def train(self, split: Split, batches: GlobalBatches, after_step: Callable[[Tensor, Tensor], None]) -> None:
        """Train the run's steps in one pass; with --verbose 2 paddle.Model prints its progress.

        Args:
            split: the training set.
            batches: this rank's shards of the global batches.
            after_step: called after each update with this rank's summed loss and its `count_correct`.
        """
        run = self.run

        def on_train_batch_end(index: int, logs: dict[str, Any] | None = None) -> None:
            run.timer.mark(COMMUNICATION)  # includes the optimizer: paddle.Model has no callback before it
            values = dict(logs or {})
            after_step(self.loss.loss_sum, self.loss.correct)  # collective
            if logs:  # an evaluation has put its values there, because fit and evaluate share one default argument
                logs.update(values)

        callback = paddle.callbacks.Callback()
        callback.on_train_batch_end = on_train_batch_end
        shards = Shards(run, split, batches)
        verbose = run.options.verbose
        if len(shards):  # its progress cannot end at 0
            with redirect_stdout(LogLines() if verbose else sys.stdout):
                self.fit(shards, verbose=verbose, log_freq=run.options.log_every, callbacks=[callback])  # collective

    def sum_shards(self, test: Split) -> Tensor:
        """Return this rank's terms for the sums over ranks in `evaluate` of train.py, float64 [4].

        paddle.Model gathers scores and labels of all ranks, and every rank counts. It requires equal shapes, so shorter
        shards are padded with a row that matches no score and does not count.
        """
        n = len(test.labels)
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        first, last = shard(n, rank, world_size)
        rows = first + np.arange(-(-n // world_size))  # as many as the longest shard has
        sums = np.zeros(4)

        def padded() -> Iterator[tuple[Tensor, Tensor]]:
            for chunk in np.split(rows, range(EVAL_BATCH_SIZE, len(rows), EVAL_BATCH_SIZE)):
                images, labels = test.batch(np.minimum(chunk, last - 1), self.run.options.dtype)
                counts = chunk < last
                sums[3] += counts.sum()
                no_labels = paddle.full_like(labels, NO_LABEL)
                yield images, paddle.where(paddle.to_tensor(counts), labels, no_labels)

        def on_eval_batch_end(index: int, logs: dict[str, Any] | None = None) -> None:
            sums[0] += self.loss.loss_sum.item()
            sums[1:3] = self.accuracy.total if rank == 0 else 0  # of all ranks
            self.run.monitor.beat()

        callback = paddle.callbacks.Callback()
        callback.on_eval_batch_end = on_eval_batch_end
        self.accuracy.reset()  # it also counts in training
        self.evaluate(padded(), verbose=0, callbacks=[callback])  # collective
        self.accuracy.reset()
        return paddle.to_tensor(sums)
