"""The adapter for programs of this repository that have an optimizer of torch."""

from typing import Any

from samestep_record import after_import, record_batch, record_evaluation


def watch(sharding: Any) -> None:
    indices = sharding.GlobalBatches.indices
    eval_batches = sharding.eval_batches
    shard = sharding.shard
    evaluated: list[Any] = []

    def recorded(self: Any, step: int, *more: Any) -> Any:
        samples = indices(self, step, *more)
        record_batch(samples)  # before the optimizer's step
        return samples

    def cut(*arguments: Any) -> list[Any]:
        evaluated[:] = eval_batches(*arguments)
        return [*evaluated]

    def chosen(length: int, *more: Any) -> tuple[int, int]:
        first, stop = shard(length, *more)
        if length == len(evaluated):  # the batches of an evaluation, not the samples of a step
            record_evaluation([i for batch in evaluated[first:stop] for i in batch], sum(map(len, evaluated)))
        return first, stop

    sharding.GlobalBatches.indices, sharding.eval_batches, sharding.shard = recorded, cut, chosen


after_import("samestep.sharding", watch)
