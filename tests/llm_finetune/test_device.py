"""Test that steps and evaluations compute on the device, not on the CPU.

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
import transformers.masking_utils
from torch.testing._internal.distributed.fake_pg import FakeStore
import train
from data import load, make_sampler
from model import TokenLoss, build_model, load_tokenizer
from options import parse
from samestep.env import World
from samestep.run import Run
from samestep.torch import DataLoader

class Alone(torch.nn.Module):  # in place of DDP, which reduces gradients where they are
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, *inputs):
        return self.module(*inputs)
    def no_sync(self):
        return contextlib.nullcontext()

torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True  # which tokens are targets: all
meta = torch.device("meta")
# It reads a tensor's content, to find several texts in a row: here is one.
transformers.masking_utils.find_packed_sequence_indices = lambda positions: None
# torch has no autocast for meta.
torch.autocast = lambda *_, **__: contextlib.nullcontext()
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
options = parse(["--model=tiny", "--lora=4", "--lora-dropout=0.1", "--dataset=definitions-240"])
tokenizer = load_tokenizer(options)
model = build_model(options, tokenizer).to(meta)
optimizer = train.build_optimizer(options, model)
train_set, test_set = load(options, tokenizer)
sampler = make_sampler(options, train_set, 1, 2)
loss_model = TokenLoss(model, False)
for step, (tokens, labels) in zip(range(2), DataLoader(train_set, batch_sampler=sampler, seeded=False)):
    loss = train.train_step(options, Alone(loss_model), optimizer, sampler, tokens.to(meta), labels.to(meta))
tensors = [*model.state_dict().values(), loss]
tensors += [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
try:
    evaluated = str(train.evaluate(Run("llm_finetune", options, World(1, 2)), loss_model, test_set, 256))
except RuntimeError as problem:  # sums.sum().item(), after everything else: there is no content
    evaluated = str(problem)
print(json.dumps([sorted({str(each.device) for each in tensors}), evaluated]))
"""


def test_a_step_and_an_evaluation_stay_on_the_device() -> None:
    devices, message = told_by("llm_finetune", PROGRAM)
    assert devices == ["meta"]
    assert "meta tensor" in message
