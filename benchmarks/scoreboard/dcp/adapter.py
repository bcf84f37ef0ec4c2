"""The adapter for the example of torch.distributed.checkpoint, which generates its inputs.

In each step, all ranks generate the same rows from a seed, and the seed is the step. A mean over ranks is therefore the
mean over these rows. The adapter numbers the rows by seed and position, and records an equal share for each rank.
"""

from typing import Any

from samestep_record import after_import, record_batch


def watch(torch: Any) -> None:
    generate = torch.rand

    def recorded(rows: int, columns: int, **options: Any) -> Any:
        first = torch.initial_seed() * rows
        ranks = torch.distributed.get_world_size()
        record_batch(range(first + torch.distributed.get_rank(), first + rows, ranks))
        return generate(rows, columns, **options)

    torch.rand = recorded


after_import("torch", watch)
