"""Test that steps, evaluations and sharded models compute on the device, with FSDP and tensor parallelism.

Tensors on torch's device "meta" have a device but no content. As on a GPU, an operation that mixes them with CPU
tensors fails.
"""

from __future__ import annotations

from harness import told_by

PROGRAM = """
import json
import numpy as np
import torch
import torch.distributed as dist
import distributed
import model
import train
import weights
from data import load
from options import parse
from samestep.env import World
from samestep.run import Run
from samestep.step_timer import StepTimer
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, exact
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

class Streams:  # of the device meta, which has none: the CPU's do nothing
    def __getattr__(self, name):
        return getattr(torch.cpu, name)
    def current_device(self):
        return 0

torch.meta = Streams()
FSDPParamGroup._validate_no_meta_params = lambda group: None
model.initialize = lambda *arguments: None  # it copies drawn values to wherever the weights are
adamw = torch.optim.AdamW
torch.optim.AdamW = lambda *arguments, fused, **settings: adamw(*arguments, **settings)  # meta has no fused one
read = []
torch.Tensor.item = lambda tensor: read.append(tensor) or 1.0  # there is no content
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
meta = torch.device("meta")
sizes = ["--layers=2", "--width=64", "--heads=2", "--context=16"]
options = parse([*sizes, "--mesh=2x2", "--clip-norm=1", "--accumulate=2", "--checkpoint-activations", "--dropout=0.1"])
mesh = distributed.make_mesh(options, meta)
gpt = model.build_model(options, torch.float32, mesh)
optimizer = train.build_optimizer(options, gpt)
train_set, test_set = load(options, meta)
sampler = GlobalBatchSampler(len(train_set), 5, seed=1, accumulate=2, group=mesh["dp"])
exact(gpt, sampler)
for _, windows in zip(range(2), DataLoader(train_set, batch_sampler=sampler, seeded=False)):
    loss = train.train_step(options, gpt, optimizer, sampler, windows, mesh, StepTimer())
eval_sampler = EvalSampler(len(test_set), 32, even=True, group=mesh["dp"])
try:
    run = Run("gpt_fsdp", options, World(1, 4))
    loader = DataLoader(test_set, batch_sampler=eval_sampler, seeded=False)
    evaluated = str(train.evaluate(run, gpt, loader, mesh, torch.float32))
except NotImplementedError as problem:  # sums.tolist(), after everything else
    evaluated = str(problem)
tensors = [loss, *gpt.parameters(), *(each.grad for each in gpt.parameters())]
tensors += [each for each in read if each.dtype == torch.float64]  # norms; AdamW reads its step
tensors += [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]

class Stored:  # an array of a checkpoint
    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), np.dtype("float32")
    def read(self, offset=(), shape=()):
        return np.zeros(shape, np.float32)

names = dict(gpt.named_parameters())
stored = {name: Stored(parameter) for name, parameter in names.items()}
weights.model_shards = lambda *model: stored
weights.state_dict_diff = lambda *arrays: None
state = {f"{name}.{key}": Stored(value) for name, p in names.items() for key, value in optimizer.state[p].items()}
optimizer.state.clear()
weights.load(gpt, optimizer, mesh, {"model": stored, "optimizer": state})
loaded = [value for values in optimizer.state.values() for value in values.values()]
devices = [sorted({each.device.type for each in some}) for some in (tensors, loaded)]
print(json.dumps([*devices, sorted({key.rpartition(".")[2] for key in state}), evaluated]))
"""


def test_a_step_an_evaluation_and_a_restored_state_stay_on_the_device() -> None:
    state = ["exp_avg", "exp_avg_sq", "step"]  # a fused AdamW reads its step on the device
    problem = "Cannot copy out of meta tensor; no data!"
    assert told_by("gpt_fsdp", PROGRAM) == [["meta"], ["meta"], state, problem]
