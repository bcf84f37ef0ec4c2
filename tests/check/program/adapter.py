"""The adapter for programs of this repository that have an optimizer of torch."""

from typing import Any

from samestep_record import after_import, record_batch


def watch(sharding: Any) -> None:
    indices = sharding.GlobalBatches.indices

    def recorded(self: Any, step: int, *more: Any) -> Any:
        shard = indices(self, step, *more)
        record_batch(shard)  # before the optimizer's step
        return shard

    sharding.GlobalBatches.indices = recorded


after_import("samestep.sharding", watch)
