"""Compute the same steps as the other APIs by paddle.Model (``--api highlevel``), whose fit contains the loop."""

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

NO_LABEL = -1  # label of a padding row; paddle.Model supports neither empty batches nor unequal batches


class MeanOverGlobalBatch(nn.Layer):  # type: ignore[misc]
    """Cross entropy, scaled so that the average of the ranks' gradients is the gradient of the global batch's mean.

    Attributes:
        loss_sum: summed loss of this rank's last batch.
        correct: `count_correct` of this rank's last batch.
    """

    def forward(self, scores: Tensor, labels: Tensor, global_size: Tensor | None = None) -> Tensor:
        """Return the scaled loss, or the summed loss if ``global_size`` is None.

        Args:
            scores: scores [m, 10].
            labels: labels int64 [m]; NO_LABEL in padding rows.
            global_size: number of samples in the global batch, int64 [].
        """
        loss_sum = F.cross_entropy(scores, labels, reduction="sum", ignore_index=NO_LABEL)
        self.loss_sum = loss_sum.detach()
        self.correct = count_correct(scores, labels)
        if global_size is None:
            return loss_sum
        return loss_sum * (dist.get_world_size() / global_size.astype(scores.dtype))


class Shards:
    """An iterable of (images, labels, size of the global batch) of this rank for each step, for paddle.Model."""

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
            distributed.seed_generators(step_seed(batches.seed, step))
            with run.timer.phase(INPUT):
                images, labels = self._split.batch(batches.indices(step), run.options.dtype)
                if not len(labels):  # the shard is empty: use one padding row
                    images = paddle.zeros([1, *images.shape[1:]], images.dtype)
                    labels = paddle.full([1], NO_LABEL, "int64")
            yield images, labels, paddle.to_tensor(batches.size(step))


class LogLines(io.TextIOBase):
    """A text file that writes each line to the log. Rank 0 prints the log to the console."""

    def write(self, text: str) -> int:
        """Log the lines of ``text`` that are not blank."""
        for line in filter(str.strip, text.splitlines()):
            log.info(line)
        return len(text)


class HighLevel(paddle.Model):  # type: ignore[misc]
    """A paddle.Model with the app's loss and metrics, and with hooks for the Run."""

    def __init__(self, run: Run, network: nn.Layer, optimizer: Optimizer, images: Tensor, labels: Tensor) -> None:
        """Prepare the model for distributed training.

        Args:
            run: run that receives the progress of each step.
            network: network to train.
            optimizer: optimizer of the network's parameters.
            images: any images [m, 1, 28, 28], m > 0, for `fix_reduction_order`.
            labels: labels of the images, int64 [m].
        """
        super().__init__(network)
        self.run = run
        self.loss = MeanOverGlobalBatch()
        self.accuracy = paddle.metric.Accuracy(topk=(1, 2))
        self.prepare(optimizer, self.loss, self.accuracy)  # collective: all ranks get rank 0's weights
        targets = [labels, paddle.to_tensor(1)]
        sample_step = partial(self.train_batch, [images], targets, update=False)
        distributed.fix_reduction_order(network, sample_step)  # collective
        self.accuracy.reset()  # discard the counts of the sample
        distributed.time_gradients(network, run.timer)

    def train_batch(self, *arguments: Any, **settings: Any) -> Any:
        """Call paddle.Model.train_batch inside `monitor.collective`, because backward waits for other ranks."""
        with self.run.monitor.collective("train_batch"):
            return super().train_batch(*arguments, **settings)  # collective

    def train(self, split: Split, batches: GlobalBatches, after_step: Callable[[Tensor, Tensor], None]) -> None:
        """Train all steps of the run in one call of `fit`. If --verbose is 2, paddle.Model prints its progress.

        Args:
            split: training set, on the training device.
            batches: this rank's shards of the global batches.
            after_step: function that is called after each update with this rank's summed loss and `count_correct`.
        """
        run = self.run

        def on_train_batch_end(index: int, logs: dict[str, Any] | None = None) -> None:
            run.timer.mark(COMMUNICATION)  # includes the update, because paddle.Model has no callback before the update
            values = dict(logs or {})
            after_step(self.loss.loss_sum, self.loss.correct)  # collective
            if logs:  # undo an evaluation's changes, because fit and evaluate share this dict, a default argument
                logs.update(values)

        callback = paddle.callbacks.Callback()
        callback.on_train_batch_end = on_train_batch_end
        shards = Shards(run, split, batches)
        verbose = run.options.verbose
        if len(shards):  # paddle.Model's progress display fails for 0 steps
            with redirect_stdout(LogLines() if verbose else sys.stdout):
                self.fit(shards, verbose=verbose, log_freq=run.options.log_every, callbacks=[callback])  # collective

    def sum_shards(self, test: Split) -> Tensor:
        """Return summed loss, top-1 count, top-2 count and number of examples, float64 [4], for train.evaluate.

        The loss and the number of examples cover only this rank's shard. paddle.Model gathers scores and labels of all
        ranks, so rank 0 returns the counts of all ranks, and other ranks return 0. paddle.Model requires equal shapes,
        so shorter shards get a padding row, whose label is NO_LABEL.
        """
        n = len(test.labels)
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        first, last = shard(n, rank, world_size)
        rows = first + np.arange(-(-n // world_size))  # every rank has as many rows as the longest shard
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
            sums[1:3] = self.accuracy.total if rank == 0 else 0  # the counts of all ranks, up to this batch
            self.run.monitor.beat()

        callback = paddle.callbacks.Callback()
        callback.on_eval_batch_end = on_eval_batch_end
        self.accuracy.reset()  # discard the counts of training
        self.evaluate(padded(), verbose=0, callbacks=[callback])  # collective
        self.accuracy.reset()
        return paddle.to_tensor(sums)
