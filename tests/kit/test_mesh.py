"""Test the kit on a device mesh: ranks with the same data, FSDP2, and sharded checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.numpy
from kit_programs import run_ranks

PROGRAM = """
import json
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FOLDER, PEERS, LAST = Path("{folder}"), {peers}, {last}
mesh = init_device_mesh("cpu", (world_size // PEERS, PEERS), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
block = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 6))
model = nn.Sequential(nn.Linear(3, 5), block, nn.ReLU(), nn.Linear(6, 3)).double()
fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
dataset = list(torch.randn(22, 2, 3, generator=torch.Generator().manual_seed(3)).double())
sampler = GlobalBatchSampler(22, 8, group=mesh["dp"])
exact(model, sampler)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loader = DataLoader(dataset, batch_sampler=sampler)
checkpoints = Checkpoints(FOLDER, every=4, grace=None, model=model, optimizer=optimizer, sampler=sampler)
first = checkpoints.restore()
losses = []
for epoch in range(sampler.epoch, 3):
    for batch in loader:
        if checkpoints.steps == LAST:
            break
        x, y = batch[:, 0], batch[:, 1]
        loss = global_mean((model(x) - y).square().sum(), len(y), group=mesh["dp"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoints.step()
        losses.append(loss.item())
checkpoints.finish()
model.eval()
total = torch.zeros(2, dtype=torch.float64)
for batch in DataLoader(dataset, batch_sampler=EvalSampler(22, 4, even=True, group=mesh["dp"])):
    total += torch.tensor([model(batch[:, 0]).sum(), len(batch)], dtype=torch.float64)
total = global_sum(*total, group=mesh["dp"])
print(json.dumps([first, losses, total]))
end()
"""


def run(folder: Path, world_size: int, peers: int, name: str, last: int = 9) -> tuple[int, list[float], list[float]]:
    """Train to step ``last`` with ``peers`` ranks on the same data; return the first step, losses and an evaluation."""
    program = PROGRAM.format(folder=folder / name, peers=peers, last=last)
    outputs = run_ranks(program, world_size, folder)
    assert len(set(outputs)) == 1  # all ranks have the same losses
    first, losses, totals = json.loads(outputs[0])
    return first, losses, totals


def test_a_sharded_model_takes_the_same_steps_at_another_mesh_after_a_resume(tmp_path: Path) -> None:
    _, expected, total = run(tmp_path, 1, 1, "one")
    _, losses, _ = run(tmp_path, 4, 2, "relay", last=5)
    first, more, other_total = run(tmp_path, 3, 1, "relay")
    assert first == 4
    assert len(expected) == 9
    assert losses[:4] + more == pytest.approx(expected, rel=1e-12, abs=0)
    assert other_total[1] == total[1] == 22
    assert other_total[0] == pytest.approx(total[0], rel=1e-9)
    folder = tmp_path / "relay" / "checkpoints" / "step-00000004"
    shapes = {}
    for rank in range(4):
        arrays = safetensors.numpy.load((folder / f"model-{rank:05d}.safetensors").read_bytes())
        shapes[rank] = {name: array.shape for name, array in arrays.items()}
    assert (shapes[0]["0.weight"], shapes[2]["0.weight"]) == ((3, 3), (2, 3))
    assert (shapes[1], shapes[3]) == ({}, {})  # ranks 1 and 3 hold the same shards as ranks 0 and 2


REFUSALS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")

mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
refused(lambda: GlobalBatchSampler(8, 4, group=mesh))
refused(lambda: EvalSampler(8, 4, group=init_device_mesh("cpu", (2, 1))))
refused(lambda: global_mean(torch.ones(()), 1, group="dp"))
refused(lambda: GlobalBatchSampler(8, 4, rank=0, world_size=2, group=mesh["dp"]))
groups = [dist.new_group([number]) for number in range(2)]
refused(lambda: GlobalBatchSampler(8, 4, group=groups[1 - rank]))
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
fully_shard(model[1], mesh=mesh["dp"])
refused(lambda: exact(model))
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
fully_shard(model[1], mesh=mesh["dp"])
refused(lambda: exact(model, FixedRows()))
end()
"""


def test_bad_groups_and_modules_that_are_sharded_alone_are_refused_on_all_ranks(tmp_path: Path) -> None:
    several = (
        "ValueError: group is a device mesh of 2 axes: pass the one over which ranks take different data, such as "
        "group=mesh['dp']"
    )
    for rank, output in enumerate(run_ranks(REFUSALS, 2, tmp_path)):
        assert output.splitlines() == [
            several,
            several,
            "TypeError: group is a str: pass a process group, or an axis such as mesh['dp']",
            "ValueError: group is given, and rank and world_size too: pass the group alone, or the other two",
            f"ValueError: group does not contain rank {rank}: pass the group of this rank",
            *["ValueError: fully_shard has replaced the class of 1: call exact() before, or shard its parent instead"]
            * 2,
        ]
