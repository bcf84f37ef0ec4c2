"""Compare DataParallel with DDP on the same global batches, from the same weights, in float64.

    bash scripts/run_collectives_lab.sh 2 launchers
    torchrun --standalone --nproc-per-node=2 apps/collectives_lab/data_parallel.py

DataParallel runs in one process without ranks. It splits the batch of each step into a piece per GPU, and copies the
model to each GPU. It computes each piece in a separate thread, and gathers the outputs on the first GPU. The loss is
the loss of the global batch, so its gradient needs no factor. A rank of DDP computes only the loss of its shard.

DataParallel calls the wrapped module directly if torch finds no GPU. ``device_ids`` is then empty (torch 2.13,
torch/nn/parallel/data_parallel.py, lines 146 to 149 and 174 to 175). `in_pieces` runs DataParallel's algorithm
for several devices on one device. This program was never run with DataParallel on a GPU.

The output device needs more memory than the other devices. The output device is the first GPU by default (line 158).
This GPU holds the outputs of all pieces (line 197; torch/nn/parallel/_functions.py, line 109) and the loss. The
first GPU also holds the weights, the sum of all gradients (_functions.py, lines 39 to 41) and the optimizer's state.
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

# The batch is not divisible by 2 or 3. Dropout is off, because each of DataParallel's copies would draw its own masks.
SAMPLES = 125
CLASSES = 10
TRAINING = (f"--global-batch-size={SAMPLES}", "--dropout=0", "--dtype=float64")
ALONE = World(0, 1)


class Wrapped(Strategy):
    """A strategy of one process that trains the wrapped model on the global batch, without averaging."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        self.wrap = wrap

    def prepare(self, model: nn.Module) -> Any:
        return self.wrap(model)


def in_pieces(model: nn.Module, count: int) -> Callable[[Tensor, BatchSlice], Tensor]:
    """Return a function that computes DataParallel's forward pass for ``count`` devices on one device."""

    def forward(images: Tensor, rows: BatchSlice) -> Tensor:
        outputs = [model(piece, rows) for piece in images.chunk(count)]
        return torch.cat(outputs)

    return forward


def measure(strategy: Strategy, steps: int, training: Split, world: World = ALONE) -> dict[str, Any]:
    """Train ``steps`` steps by a strategy. All ranks of ``world`` must call this function.

    Args:
        strategy: strategy that prepares the model.
        steps: number of steps.
        training: training set, on the training device.
        world: rank and world size; by default a single rank.

    Returns:
        A dict with the first step's "gradients", the final "weights" (both float64 [21840]), the number of "calls" of
        the model per step, and the "module" that the strategy prepared.
    """
    options = parse(["aggregate", *TRAINING])
    trainer = Trainer(strategy, options, training, world)
    calls: list[Any] = []
    trainer.model.register_forward_hook(lambda *_: calls.append(None))  # DataParallel's copies have this hook too
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
    """Return the bytes (on the output device, on each other device) of each kind of data, without activations.

    Args:
        model_bytes: size of all parameters in float64, in bytes.
        sample_bytes: size of one image in float64, in bytes.
        samples: number of samples in the global batch.
        n: number of devices.
    """
    piece = -(-samples // n)  # largest number of samples on another device
    return {
        "weights": (model_bytes, model_bytes),
        "gradients": (model_bytes, model_bytes),
        "momentum": (model_bytes, 0),
        "images": (samples * sample_bytes, piece * sample_bytes),
        "outputs": (samples * CLASSES * 8, piece * CLASSES * 8),
    }


def main() -> None:
    """Train by DDP, DataParallel, `in_pieces`, and the plain step (without a wrapper), and write data_parallel.json."""
    options = parse(["launchers", *sys.argv[1:]])
    world, device = rendezvous(options)
    training, _ = load("mnist-5k", Path("data"), device)
    n = world.world_size
    ddp = measure(TorchDDP(), options.steps, training, world)
    if world.rank > 0:  # the remaining measurements run in rank 0, which may use every GPU
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
        held = [torch.cuda.memory_allocated(each) for each in devices]  # bytes in use before training
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
    """Return the largest absolute differences between the results ``way`` and ``plain`` of `measure`.

    Args:
        name: name of the way.
        way: result of the way.
        plain: result of the plain step.
        processes: number of processes that the way uses.
    """
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
