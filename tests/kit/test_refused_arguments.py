"""Test mistakes that only one rank can detect: all ranks must raise the same error, so that no rank waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_programs import run_ranks
from samestep.sharding import GlobalBatches
from samestep.torch.reduction import gradient_tree
from torch import nn

PROGRAM = """
from pathlib import Path
from samestep import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel

def refused(call):
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

class FunctionalDropout(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)

def first_pass(model, dataset, batch_size):
    sampler = GlobalBatchSampler(len(dataset), batch_size)
    model = exact(DDP(model), sampler)
    for x in DataLoader(dataset, batch_sampler=sampler):
        model(x)

refused(lambda: first_pass(nn.BatchNorm1d(3), torch.ones(3, 3), 2))  # the last batch has one example
refused(lambda: first_pass(nn.Sequential(FunctionalDropout(3, 3)), torch.ones(4, 3), 2))

def made(seed=0, **parts):
    sampler = GlobalBatchSampler(9, 2, seed=seed)
    return Checkpoints("FOLDER", grace=None, sampler=sampler, **parts)

made().save()
made().finish()
dist.barrier()
refused(lambda: made(seed=1).restore())
refused(lambda: made(numbers={}).restore())
refused(lambda: made(numbers={"a": os.environ}))
refused(lambda: made(model=FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))))
dist.barrier()
if rank == 0:
    (folder,) = checkpoint.folders(Path("FOLDER"))
    (folder / "manifest.json").write_text("{}")
dist.barrier()
refused(lambda: made().restore())
end()
"""


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    program = PROGRAM.replace('"FOLDER"', repr(str(tmp_path / "saved")))
    outputs = run_ranks(program, 2, tmp_path)
    assert outputs[0] == outputs[1]
    one_value, drawing, seed, parts, value, sharded, damaged = outputs[0].splitlines()
    assert one_value == (
        "ValueError: batch norm needs more than 1 value per channel in the global batch: use drop_last=True, or "
        "another batch size"
    )
    assert drawing.startswith("ValueError: 0 (FunctionalDropout) draws random numbers in its forward pass")
    assert seed == "ValueError: the checkpoint has seed 0, not 1: set it back, or start anew"
    assert parts.startswith("ConfigError: the checkpoint in ")
    assert parts.endswith(": pass these parts, or move the folder away, or pass another one")
    assert value.startswith("TypeError: numbers['a'] is a os._Environ")
    assert sharded.startswith("TypeError: model has a FullyShardedDataParallel, whose state depends on the rank: use")
    assert damaged.startswith("NonRetryableError: ")
    assert damaged.endswith("or move the folder away, or pass another one")


def test_gradients_of_other_ranks_than_those_that_train_are_refused() -> None:
    """A sampler that was created before the process group has the batches of one rank. Here it is the reverse."""
    batches = GlobalBatches(9, 4, seed=1, rank=0, world_size=2, virtual_ranks=4)
    with pytest.raises(ValueError, match="the batches are for 2 ranks, and the process group has 1: create"):
        gradient_tree(nn.Linear(2, 2), batches)
