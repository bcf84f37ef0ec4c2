"""The adapter for mnist_elastic. It records nothing of a failed attempt of a step."""

from typing import Any

from samestep_record import after_import, record_batch, record_evaluation

samples: list[int] = []  # the samples of this rank's current attempt


def watch(sharding: Any) -> None:
    indices = sharding.GlobalBatches.indices
    eval_batches = sharding.eval_batches
    shard = sharding.shard
    evaluated: list[Any] = []

    def chosen(self: Any, *arguments: Any) -> Any:
        found = indices(self, *arguments)
        samples.extend(found)
        return found

    def cut(*arguments: Any) -> list[Any]:
        evaluated[:] = eval_batches(*arguments)
        return [*evaluated]

    def taken(length: int, *more: Any) -> tuple[int, int]:
        first, stop = shard(length, *more)
        if length == len(evaluated):  # the batches of an evaluation, not the samples of a step
            record_evaluation([i for batch in evaluated[first:stop] for i in batch], sum(map(len, evaluated)))
        return first, stop

    sharding.GlobalBatches.indices, sharding.eval_batches, sharding.shard = chosen, cut, taken


def watch_members(membership: Any) -> None:
    attempt = membership.Members.attempt
    check = membership.Members.check

    def begun(self: Any) -> Any:
        samples.clear()
        return attempt(self)

    def checked(self: Any, *arguments: Any) -> None:
        check(self, *arguments)
        record_batch(samples)  # the optimizer's step follows

    membership.Members.attempt, membership.Members.check = begun, checked


after_import("samestep.sharding", watch)
after_import("membership", watch_members)
