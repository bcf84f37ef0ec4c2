"""DataParallel beside DDP: the same steps on the same global batches, from the same weights, in float64.

    bash scripts/run_collectives_lab.sh 2 launchers
    torchrun --standalone --nproc-per-node=2 apps/collectives_lab/data_parallel.py

DataParallel is one process and has no ranks. In every step it cuts the batch into a piece for each GPU, copies the
model to each, computes each piece in a thread of its own, and puts the outputs together on the first GPU. The loss
over them is over the global batch, so its gradient needs no factor; in DDP a rank knows the loss of its own part.

Without a GPU it does nothing: its __init__ finds no device and leaves ``device_ids`` empty, and its forward then calls
the module as it is (torch 2.13, torch/nn/parallel/data_parallel.py, lines 146 to 149 and 174 to 175). ``in_pieces`` is
what it does with several, written out. DataParallel itself was never run on a GPU here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from aggregate import train_step
from data import Split, load
from model import Net, build_model
from options import parse
from ranks import rendezvous, write_json
from samestep import env, log
from samestep.sharding import GlobalBatches, Rows
from strategies import STRATEGIES
from torch import Tensor, nn

BATCH, SEED, LR, MOMENTUM = 125, 1, 0.03, 0.9  # a batch that 2 and 3 pieces do not divide evenly


def in_pieces(model: Net, count: int) -> Callable[[Tensor, Rows], Tensor]:
    """DataParallel's forward with ``count`` devices, on one: scatter, apply the copies, gather."""
    return lambda images, rows: torch.cat([model(piece, rows) for piece in images.chunk(count)])


def measure(
    wrap: Callable[[Net], Any],
    steps: int,
    training: Split,
    device: torch.device,
    take: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Train by what ``wrap`` makes of the model: the first step's gradients and the last weights, float64 [21840], and
    how often a step calls the model. ``take`` is DDP's step; without it one process has the whole global batch."""
    # No dropout: the copies would each draw for their own piece.
    model = build_model(0.0, torch.float64, SEED).to(device)
    calls: list[Any] = []
    model.register_forward_hook(lambda *_: calls.append(None))  # DataParallel's copies have it too
    module = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    gradients = torch.empty(0)
    for step in range(steps):
        if take:
            take(module, optimizer, step)
        else:
            images, labels = training.batch(
                GlobalBatches(len(training.labels), BATCH, SEED).indices(step), torch.float64
            )
            optimizer.zero_grad()
            F.nll_loss(module(images, Rows(0, len(images))), labels).backward()
            optimizer.step()
        if step == 0:
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"gradients": gradients, "weights": weights, "calls": len(calls) / steps, "module": module}


def by_ddp(steps: int, training: Split, world: env.World, device: torch.device) -> dict[str, Any]:
    """The same on all ranks, each with its part of the global batch. Ranks talk."""
    strategy = STRATEGIES["ddp"]()
    batches = GlobalBatches(len(training.labels), BATCH, SEED, world.rank, world.world_size)

    def take(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        images, labels = training.batch(batches.indices(step), torch.float64)
        train_step(strategy, module, optimizer, images, labels, batches.rows(step))

    return measure(strategy.prepare, steps, training, device, take)


def main() -> None:
    options = parse(["launchers", *sys.argv[1:]])
    world, device = rendezvous(options)
    training, _ = load("mnist-5k", Path("data"), device)
    n, steps = world.world_size, options.steps
    ddp = by_ddp(steps, training, world, device)
    if world.rank > 0:  # the rest is one process's, and may use every GPU
        return
    devices = list(range(n)) if device.type == "cuda" else None
    plain = measure(lambda model: model, steps, training, device)
    parallel = measure(lambda model: nn.DataParallel(model, device_ids=devices), steps, training, device)
    ways = {
        "plain": (1, plain),
        "DataParallel": (1, parallel),
        f"its algorithm, in {n} pieces": (1, measure(lambda model: in_pieces(model, n), steps, training, device)),
        "DistributedDataParallel": (n, ddp),
    }
    found = {
        "world_size": n,
        "device": device.type,
        "steps": steps,
        "devices_of_data_parallel": parallel["module"].device_ids,
        "ways": [
            {
                "way": name,
                "processes": processes,
                "calls_per_step": each["calls"],
                "gradients_difference": float((each["gradients"] - plain["gradients"]).abs().max()),
                "weights_difference": float((each["weights"] - plain["weights"]).abs().max()),
            }
            for name, (processes, each) in ways.items()
        ],
    }
    write_json(options.run_dir, "data_parallel", found)


if __name__ == "__main__":
    log.run(main)
