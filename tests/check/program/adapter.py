"""The adapter for programs of this repository that have an optimizer of torch."""

import os
from typing import Any

from samestep_record import after_import, record_batch, record_evaluation


def watch(sharding: Any) -> None:
    indices, eval_batches = sharding.GlobalBatches.indices, sharding.eval_batches

    def recorded(self: Any, step: int, *more: Any) -> Any:
        shard = indices(self, step, *more)
        record_batch(shard)  # before the optimizer's step
        return shard

    class Evaluation(list[Any]):
        def __init__(self, length: int, *more: Any) -> None:
            super().__init__(eval_batches(length, *more))
            self.length, self.used = length, list[int]()

        def __getitem__(self, k: Any) -> Any:
            self.used.extend(super().__getitem__(k))
            _, end = sharding.shard(len(self), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            if k + 1 == end and self.length > 1:  # this rank's last batch, and not a warm-up
                record_evaluation(self.used, self.length)
            return super().__getitem__(k)

    sharding.GlobalBatches.indices, sharding.eval_batches = recorded, Evaluation


after_import("samestep.sharding", watch)
