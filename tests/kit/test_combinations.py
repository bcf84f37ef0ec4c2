"""Test the kit with other features of PyTorch: steps on one and two ranks must be equal."""

from __future__ import annotations

import json
from pathlib import Path

from kit_programs import run_ranks

PROGRAM = """
import copy
import json
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, lstm=False, checkpointing=False):
        super().__init__()
        self.embed = nn.Linear(3, 6, bias=False)
        self.lstm = nn.LSTM(6, 6, batch_first=True) if lstm else None
        self.block = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(0.3))
        self.last = nn.Linear(6, 3, bias=False)
        self.last.weight = nn.Parameter(self.embed.weight.detach().t().clone())
        self.checkpointing = checkpointing
    def forward(self, x):
        x = self.embed(x)
        if self.lstm:
            x = self.lstm(x[:, None])[0][:, -1]
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointing else self.block(x)
        return self.last(x)

class Tied(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.last.weight
        self.back = nn.Linear(6, 3)
    def forward(self, x):
        return self.other(self.last(self.back(self.block(self.embed(x)))))

generator = torch.Generator().manual_seed(3)
dataset = list(torch.randn(22, 2, 3, generator=generator).double())

def train(
    model,
    dtype=torch.float64,
    compiled=False,
    autocast=None,
    scaler=None,
    clip=0.0,
    ema=False,
    two=False,
    workers=0,
    **options,
):
    sampler = GlobalBatchSampler(22, 8, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, **options)
    model = exact(DDP(model.to(dtype)), sampler)
    average = AveragedModel(model.module, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b) if ema else None
    step_model = torch.compile(model, dynamic=True) if compiled else model
    parameters = list(model.parameters())
    cut = 2 if two else len(parameters)
    optimizers = [torch.optim.AdamW(each, 0.01) for each in (parameters[:cut], parameters[cut:]) if each]
    losses = []
    for epoch in range(2):
        for batch in loader:
            x, y = batch[:, 0], batch[:, 1]
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss_sum = (step_model(x.to(dtype)) - y.to(dtype)).square().sum()
            loss = global_mean(loss_sum, len(y))
            for optimizer in optimizers:
                optimizer.zero_grad()
            (scaler.scale(loss) if scaler else loss).backward()
            for optimizer in optimizers:
                if scaler:
                    scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, clip) if clip else torch.zeros(())
            for optimizer in optimizers:
                scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            if average:
                average.update_parameters(model.module)
            losses += [loss.item(), norm.item()]
    if average:
        model.eval(), average.eval()
        losses.append(average(torch.ones(2, 3, dtype=dtype)).sum().item())
    return losses

def run(name, make, **options):
    torch.manual_seed(0)
    results[name] = train(make(), **options)

results = {}
if __name__ == "__main__":
    run("plain", Net)
    run("bfloat16", Net, dtype=torch.float32, autocast=torch.bfloat16)
    for name, scale in (("float16", 2.0**10), ("overflow", 2.0**18)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        run(name, Net, dtype=torch.float32, autocast=torch.float16, scaler=scaler)
        results[name].append(scaler.get_scale())
    run("checkpointing", lambda: Net(checkpointing=True))
    run("compiled", Net, compiled=True)
    run("clipping", Net, clip=0.5)
    run("average", Net, ema=True)
    run("tied weights", Tied)
    run("two optimizers", Net, two=True)
    run("lstm", lambda: Net(lstm=True))
    run("persistent workers", Net, workers=1, persistent_workers=True)
    print(json.dumps(results))
    end()
"""
# Limits for lower precision, in which rounding depends on the number of rows. DDP divides by the world size after the
# backward pass, so gradients overflow at other loss scales.
LIMITS = {"bfloat16": 0.05, "float16": 0.05, "overflow": float("inf")}


def test_one_and_two_ranks_take_the_same_steps(tmp_path: Path) -> None:
    (alone,) = run_ranks(PROGRAM, 1, tmp_path)
    outputs = run_ranks(PROGRAM, 2, tmp_path)
    assert outputs[0] == outputs[1]  # the outputs include the skipped steps and the loss scale
    one = json.loads(alone)
    two = json.loads(outputs[0])
    assert two["float16"][-1] == 2**10
    assert two["overflow"][-1] < 2**18
    for name, losses in one.items():
        differences = [abs(a - b) for a, b in zip(losses, two[name])]
        assert max(differences) <= LIMITS.get(name, 1e-12), (name, max(differences))
    for name in ("checkpointing", "compiled", "persistent workers", "two optimizers"):
        differences = [abs(a - b) for a, b in zip(one["plain"], one[name])]
        assert max(differences) < 1e-12, (name, max(differences))
