"""The adapter for programs of this repository that have an optimizer of torch."""

from samestep_record import after_import, record_batch


def watch(sharding):
    indices = sharding.GlobalBatches.indices

    def recorded(self, step, *more):
        shard = indices(self, step, *more)
        record_batch(shard)  # before the optimizer's step
        return shard

    sharding.GlobalBatches.indices = recorded


after_import("samestep.sharding", watch)
