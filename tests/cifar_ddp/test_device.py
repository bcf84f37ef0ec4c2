"""Test that steps, evaluations and the average of the weights compute on the device, not on the CPU.

Tensors on torch's device "meta" have a device but no content. As on a GPU, an operation that mixes them with CPU
tensors fails.
"""

from __future__ import annotations

from harness import told_by

PROGRAM = """
import contextlib
import json
import torch
import torch.distributed as dist
import torch.fx.experimental._config
from torch.testing._internal.distributed.fake_pg import FakeStore
import ema
import train
from data import SIDE, Split, make_loader
from model import build_model
from options import parse
from samestep.env import World
from samestep.run import Run
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, distributed, exact

class Alone(torch.nn.Module):  # in place of DDP, which reduces gradients where they are
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, *inputs):
        return self.module(*inputs)
    def no_sync(self):
        return contextlib.nullcontext()

torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True  # which images are flipped: all
meta = torch.device("meta")
# torch has no autocast for meta.
torch.autocast = lambda *_, **__: contextlib.nullcontext()
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
options = parse(["--optimizer=adamw", "--clip-norm=1", "--accumulate=2", "--ema=0.9", "--dropout=0.1"])
images = torch.zeros(100, SIDE, SIDE, 3, dtype=torch.uint8, device=meta)
labels = torch.zeros(100, dtype=torch.int64, device=meta)
split = Split(images, labels, torch.zeros(3, device=meta), torch.ones(3, device=meta), torch.float32, augment_seed=1)
model = build_model(options, torch.float32).to(meta)
optimizer, average = train.build_optimizer(options, model), ema.Average(model, options.ema)
sampler = GlobalBatchSampler(100, 10, rank=1, world_size=2, accumulate=2)
exact(model, sampler)
for step, (images, labels) in zip(range(2), make_loader(options, split, sampler)):
    loss = train.train_step(options, Alone(model), optimizer, sampler, images, labels)
    average.update(model, step)
tensors = [*model.state_dict().values(), *average.model.state_dict().values(), loss]
tensors += [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
eval_sampler = EvalSampler(100, 50, rank=1, world_size=2)
eval_loader = DataLoader(split, batch_sampler=eval_sampler)
try:
    run = Run("cifar_ddp", options, World(1, 2))
    evaluated = str(train.evaluate(run, average.model, eval_loader, eval_sampler))
except (NotImplementedError, RuntimeError) as problem:  # sums.tolist() or item(): there is no content
    evaluated = str(problem)
print(json.dumps([sorted({str(each.device) for each in tensors}), evaluated]))
"""


def test_a_step_an_evaluation_and_the_average_stay_on_the_device() -> None:
    devices, evaluated = told_by("cifar_ddp", PROGRAM)
    assert devices == ["meta"]
    assert evaluated in ("Cannot copy out of meta tensor; no data!", "Tensor.item() cannot be called on meta tensors")
