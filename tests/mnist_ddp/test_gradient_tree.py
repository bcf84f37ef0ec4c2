"""Test that gradients of virtual ranks have the same bits on one and three ranks, in one collective or in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from samestep.sharding import GlobalBatches
from samestep.torch import virtual_ranks
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model, buffer = nn.Linear(7, 5), torch.zeros(3)
batches = GlobalBatches(65, 8, 1, rank, world_size, 5)  # the last batch has one sample
sums = []
for most in (2**22, 0):
    virtual_ranks.GATHER_MAX_BYTES = most
    tree = virtual_ranks.GradientTree(model, batches, [buffer])
    for step in (0, 8):
        for micro_batch in batches.micro_batches(step):
            torch.manual_seed(10 * step + micro_batch[0])
            buffer.normal_()
            model.weight.grad = torch.randn(5, 7).t().contiguous().t()  # another layout in memory
            model.bias.grad = torch.randn(5)
            tree.add(micro_batch, torch.randn(()))
            assert model.weight.grad is None
        loss = tree.all_reduce(step)
        dist.all_reduce(loss)
        sums.append([model.weight.grad, model.bias.grad, buffer.clone(), loss])
assert all(torch.equal(a, b) for one, other in zip(sums[:2], sums[2:]) for a, b in zip(one, other))
if rank == 0:
    save_file({str(i): each.contiguous() for i, each in enumerate(sums[0] + sums[1])}, sys.argv[1])
dist.barrier()
os._exit(0)  # gloo's threads may abort an orderly end
"""


def test_gradients_have_the_same_bits_by_one_or_by_two_collectives(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for n in (1, 3):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [*launcher, str(program), str(tmp_path / f"sums-{n}")]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "sums-1").read_bytes() == (tmp_path / "sums-3").read_bytes()
