"""Compare DataParallel with DDP: the same steps on the same global batches, from the same weights, in float64.

    bash scripts/run_collectives_lab.sh 2 launchers
    torchrun --standalone --nproc-per-node=2 apps/collectives_lab/data_parallel.py

DataParallel is one process and has no ranks. In every step it cuts the batch into a piece for each GPU, and copies
the model to each. It computes each piece in its own thread, and puts the outputs together on the first GPU. The loss
over them is over the global batch, so its gradient needs no factor; in DDP a rank has the loss of its own part only.

Without a GPU it does nothing. Its __init__ finds no device and leaves ``device_ids`` empty. Its forward then calls
the module as it is (torch 2.13, torch/nn/parallel/data_parallel.py, lines 146 to 149 and 174 to 175). ``in_pieces`` is
what it does with several, written out. DataParallel itself was never run on a GPU here.

The output device needs more memory than the others. It is the first GPU by default (line 158), and has the outputs of
all pieces (line 197; torch/nn/parallel/_functions.py, line 109), and the loss over them. The GPU of the weights, also
the first, has the sum of all gradients (_functions.py, lines 39 to 41) and the state of the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import Split, load
from distributed import rendezvous
from options import parse
from samestep import log
from samestep.env import World
from samestep.sharding import BatchSlice
from show import write_json
from strategies import Strategy, TorchDDP
from torch import Tensor, nn
from training import Trainer

# A batch that 2 and 3 pieces do not divide evenly. No dropout: DataParallel's copies would each draw for their piece.
SAMPLES = 125
CLASSES = 10
TRAINING = (f"--global-batch-size={SAMPLES}", "--dropout=0", "--dtype=float64")
ALONE = World(0, 1)


class Wrapped(Strategy):
    """Average nothing: one process has the whole global batch, and calls what ``wrap`` makes of the model."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        self.wrap = wrap

    def prepare(self, model: nn.Module) -> Any:
        return self.wrap(model)


def in_pieces(model: nn.Module, count: int) -> Callable[[Tensor, BatchSlice], Tensor]:
    """Return DataParallel's forward with ``count`` devices, on one: scatter, apply the copies, gather."""

    def forward(images: Tensor, rows: BatchSlice) -> Tensor:
        outputs = [model(piece, rows) for piece in images.chunk(count)]
        return torch.cat(outputs)

    return forward


def measure(strategy: Strategy, steps: int, training: Split, world: World = ALONE) -> dict[str, Any]:
    """Train by a strategy; with more than one rank this is collective.

    Returns:
        The first step's gradients and the last weights, float64 [21840], how often a step calls the model, and the
        model after the strategy.
    """
    options = parse(["aggregate", *TRAINING])
    trainer = Trainer(strategy, options, training, world)
    calls: list[Any] = []
    trainer.model.register_forward_hook(lambda *_: calls.append(None))  # DataParallel's copies have it, too
    gradients = torch.empty(0)
    for step in range(steps):
        trainer.update(trainer.batch())
        if step == 0:
            gradients = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    return {
        "gradients": gradients,
        "weights": trainer.weights(),
        "calls": len(calls) / steps,
        "module": trainer.module,
    }


def memory(model_bytes: int, sample_bytes: int, samples: int, n: int) -> dict[str, tuple[int, int]]:
    """Return the bytes that the output device, and each of the n - 1 others, holds beside activations.

    Args:
        model_bytes: all parameters, in float64.
        sample_bytes: one image, in float64.
        samples: the global batch.
        n: number of devices.
    """
    piece = -(-samples // n)  # the others have one of at most this size
    return {
        "weights": (model_bytes, model_bytes),
        "gradients": (model_bytes, model_bytes),
        "momentum": (model_bytes, 0),
        "images": (samples * sample_bytes, piece * sample_bytes),
        "outputs": (samples * CLASSES * 8, piece * CLASSES * 8),
    }


def main() -> None:
    """Train in every way, and write data_parallel.json."""
    options = parse(["launchers", *sys.argv[1:]])
    world, device = rendezvous(options)
    training, _ = load("mnist-5k", Path("data"), device)
    n = world.world_size
    ddp = measure(TorchDDP(), options.steps, training, world)
    if world.rank > 0:  # the rest is one process's, and may use every GPU
        return
    devices: list[int] = []
    if device.type == "cuda":
        devices = list(range(n))
    wraps: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda model: model,
        "DataParallel": lambda model: nn.DataParallel(model, device_ids=devices or None),
        f"its algorithm, in {n} pieces": lambda model: in_pieces(model, n),
    }
    ways = {}
    peaks = {}
    for name, wrap in wraps.items():
        held = [torch.cuda.memory_allocated(each) for each in devices]  # before; the training set, for example
        for each in devices:
            torch.cuda.reset_peak_memory_stats(each)
        ways[name] = measure(Wrapped(wrap), options.steps, training)
        peaks[name] = [torch.cuda.max_memory_allocated(each) - held[each] for each in devices]
    plain = ways["plain"]
    found = [compared(name, way, plain, processes=1) for name, way in ways.items()]
    found.append(compared("DistributedDataParallel", ddp, plain, processes=n))
    result = {
        "world_size": n,
        "device": device.type,
        "steps": options.steps,
        "devices_of_data_parallel": ways["DataParallel"]["module"].device_ids,
        "memory": {
            "computed": memory(plain["weights"].nbytes, 28 * 28 * 8, samples=SAMPLES, n=n),
            "measured": peaks["DataParallel"],
        },
        "ways": found,
    }
    write_json(options.run_dir, "data_parallel", result)


def compared(name: str, way: dict[str, Any], plain: dict[str, Any], processes: int) -> dict[str, Any]:
    """Return how far what `measure` returned for a way is from the plain step."""
    gradients = (way["gradients"] - plain["gradients"]).abs()
    weights = (way["weights"] - plain["weights"]).abs()
    return {
        "way": name,
        "processes": processes,
        "calls_per_step": way["calls"],
        "gradients_difference": float(gradients.max()),
        "weights_difference": float(weights.max()),
    }


if __name__ == "__main__":
    log.run(main)
