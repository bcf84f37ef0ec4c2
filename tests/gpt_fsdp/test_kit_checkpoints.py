"""Test the kit's `Checkpoints` with a model that FSDP2 and tensor parallelism shard: it resumes at other meshes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness import ROOT, Harness, bare
from samestep import checkpoint

PROGRAM = """
import json
import os
import sys
sys.path.insert(0, {app!r})
import distributed
import torch
import torch.distributed as dist
from model import build_model
from options import parse
from samestep.checkpoint import weights_sha256
from samestep.torch import Checkpoints
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
options = parse(["--layers=2", "--width=48", "--heads=4", f"--mesh={{sys.argv[1]}}"])
mesh = distributed.make_mesh(options, torch.device("cpu"))
model = build_model(options, torch.float32, mesh)
optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
checkpoints = Checkpoints({folder!r}, every=1, grace=None, model=model, optimizer=optimizer)
restored = checkpoints.restore()
checkpoints.restore()  # over a state that is there
if not restored:
    model(torch.arange(32)[None] + mesh.get_local_rank("dp")).square().sum().backward()
    optimizer.step()
    checkpoints.step()
checkpoints.finish()

def whole(values):
    return {{name: value.full_tensor().numpy() for name, value in values.items() if isinstance(value, DTensor)}}

names = {{parameter: name for name, parameter in model.named_parameters()}}
state = {{}}
for parameter, values in optimizer.state.items():
    for key, value in values.items():
        state[f"{{names[parameter]}}.{{key}}"] = value
digests = [weights_sha256(whole(model.state_dict())), weights_sha256(whole(state)), len(state)]
if dist.get_rank() == 0:
    print("STATE", json.dumps([restored, *digests]), flush=True)
dist.barrier()
os._exit(0)
"""


def run(harness: Harness, mesh: str, ranks: int) -> tuple[int, list[object]]:
    """Run the program at a mesh. Return the step that it restored, and digests of weights and optimizer state."""
    program = harness.folder / "program.py"
    app = str(ROOT / "apps" / "gpt_fsdp")
    program.write_text(PROGRAM.format(app=app, folder=str(harness.folder / "kit")))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    outcome = bare(harness, [*launcher, str(program), mesh])
    assert outcome.code == 0, outcome
    line = next(line for line in outcome.stdout.splitlines() if line.startswith("STATE "))
    restored, *digests = json.loads(line.removeprefix("STATE "))
    return restored, digests


def test_a_checkpoint_of_four_ranks_opens_at_other_meshes(harness: Harness) -> None:
    restored, expected = run(harness, "2x2", 4)
    assert restored == 0
    found = checkpoint.read(checkpoint.folder_of(Path(harness.folder / "kit"), 1))
    sizes = [found.files[f"model-{rank:05d}.safetensors"]["size"] for rank in range(4)]
    assert max(sizes) < 0.4 * sum(sizes)  # no rank wrote the full model
    assert run(harness, "3x1", 3) == (1, expected)
    assert run(harness, "1x1", 1) == (1, expected)
