"""``--api highlevel``: the same steps by paddle.Model's fit and evaluate, which own the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import ranks
from data import Split
from paddle import Tensor, nn
from paddle.callbacks import Callback
from paddle.metric import Accuracy
from paddle.optimizer import Optimizer
from samestep.phases import Phases
from samestep.sharding import GlobalBatches, shard, step_seed
from samestep.watchdog import Watchdog

NO_LABEL = -1  # of a row that counts for nothing: paddle.Model cannot do with an empty batch, nor with unequal ones
EVALUATION_BATCH = 1000  # images at a time; of no influence on the result


class MeanOverGlobalBatch(nn.Layer):  # type: ignore[misc]
    """Cross entropy, so scaled that the gradient averaged over ranks is the mean over the global batch's samples."""

    def forward(self, scores: Tensor, labels: Tensor, global_size: Tensor | None = None) -> Tensor:
        loss_sum = F.cross_entropy(scores, labels, reduction="sum", ignore_index=NO_LABEL)
        self.loss_sum, self.correct = loss_sum.detach(), (scores.argmax(axis=1) == labels).sum()
        if global_size is None:
            return loss_sum
        return loss_sum * (dist.get_world_size() / global_size.astype(scores.dtype))


class Batches:
    """This rank's shards of the global batches of ``steps``; each pass over it goes on to the end of an epoch.

    ``step`` is the one whose shard was taken last.
    """

    def __init__(self, split: Split, batches: GlobalBatches, dtype: str, steps: range) -> None:
        self.split, self.batches, self.dtype, self.stop = split, batches, dtype, steps.stop
        self.step, self._next = steps.start, steps.start

    def __len__(self) -> int:
        return min(self.batches.steps_per_epoch, self.stop - self._next)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while self._next < self.stop:
            self.step, self._next = self._next, self._next + 1
            paddle.seed(step_seed(self.batches.seed, self.step))
            images, labels = self.split.batch(self.batches.indices(self.step), self.dtype)
            if not len(labels):  # ranks outnumber the samples
                images, _ = self.split.batch(np.zeros(1, np.int64), self.dtype)
                labels = paddle.full([1], NO_LABEL, "int64")
            yield images, labels, paddle.to_tensor(self.batches.size(self.step))
            if self._next % self.batches.steps_per_epoch == 0:
                return


class HighLevel:
    """paddle.Model around the network, its loss and its metric."""

    def __init__(self, network: nn.Layer, optimizer: Optimizer, images: Tensor, labels: Tensor) -> None:
        self.loss, self.accuracy = MeanOverGlobalBatch(), Accuracy(topk=(1, 2))
        self.model = paddle.Model(network)
        self.model.prepare(optimizer, self.loss, self.accuracy)  # ranks talk: rank 0's weights are everyone's
        with ranks.unchanged(network):  # as ranks.order_sums, for the DataParallel that paddle.Model made
            for _ in range(2):
                self.model.train_batch([images], [labels, paddle.to_tensor(1)], update=False)  # ranks talk

    def fit(
        self, batches: Batches, epochs: int, phases: Phases, after_update: Callable[[int, Tensor, Tensor], None]
    ) -> None:
        """Train; after each update call ``after_update(step, this rank's summed loss, its right answers)``."""

        def on_train_batch_end(step: int, logs: dict[str, Any] | None = None) -> None:
            phases.end("waiting")  # and updating: paddle.Model has no callback between the two
            after_update(batches.step, self.loss.loss_sum, self.loss.correct)
            phases.begin()

        callback = Callback()
        callback.on_train_batch_begin = lambda step, logs=None: phases.end("input")
        callback.on_train_batch_end = on_train_batch_end
        phases.begin()
        self.model.fit(batches, epochs=epochs, verbose=0, callbacks=[callback])  # ranks talk: at each step

    def evaluate(self, test: Split, dtype: str, watchdog: Watchdog) -> dict[str, Any]:
        """Loss and accuracy over the whole test set, each example counted once.

        paddle.Model gathers scores and labels of all ranks and counts on every rank. It wants equal shapes of them,
        so that the shorter shards are filled up with a row that no score can match and that is not counted.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        shards = [shard(len(test.labels), each, world_size) for each in range(world_size)]
        longest = max(last - first for first, last in shards)
        first, last = shards[rank]
        rows = np.minimum(np.arange(first, first + longest), last - 1)

        sums = np.zeros(2)  # this rank's summed loss and examples
        correct: list[float] = []  # of all ranks: within the first one, and within the first two

        def padded() -> Iterator[tuple[Tensor, Tensor]]:
            for begin in range(0, longest, EVALUATION_BATCH):
                chosen = rows[begin : begin + EVALUATION_BATCH]
                images, labels = test.batch(chosen, dtype)
                real = np.arange(begin, begin + len(chosen)) < last - first
                sums[1] += real.sum()
                yield images, paddle.where(paddle.to_tensor(real), labels, paddle.full_like(labels, NO_LABEL))

        def on_eval_batch_end(step: int, logs: dict[str, Any] | None = None) -> None:
            nonlocal correct
            sums[0] += self.loss.loss_sum.item()
            correct = [float(each) for each in self.accuracy.total]
            watchdog.beat()

        callback = Callback()
        callback.on_eval_batch_end = on_eval_batch_end
        self.accuracy.reset()  # of what it counted in training
        self.model.evaluate(padded(), verbose=0, callbacks=[callback])  # ranks talk: at each batch
        total = paddle.to_tensor(sums)
        ranks.all_reduce(total)  # ranks talk
        loss_sum, examples = total.tolist()
        return {
            "test_loss": loss_sum / examples,
            "test_accuracy": correct[0] / examples,
            "test_accuracy_top2": correct[1] / examples,
            "test_examples": int(examples),
        }
