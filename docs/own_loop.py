"""Train a linear classifier, or resume: torchrun --standalone --nproc-per-node 2 own_loop.py RUN_DIR STEPS."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep import checkpoint, env
from samestep.data import datasets
from samestep.sharding import GlobalBatches

LR, BATCH, SEED = 0.1, 100, 1
invariants = {"lr": LR, "global_batch_size": BATCH, "seed": SEED}  # a resume must have the same
run_dir, steps = Path(sys.argv[1]), int(sys.argv[2])
world = env.detect()
dist.init_process_group("gloo")
digits = datasets.load("mnist-5k", Path("data"))
images, labels = torch.tensor(digits.train_images).flatten(1) / 255, torch.tensor(digits.train_labels).long()
batches = GlobalBatches(len(labels), BATCH, SEED, world.rank, world.world_size)
weights = {"weight": torch.zeros(10, 784), "bias": torch.zeros(10)}
momentum = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

found = checkpoint.newest(run_dir, warn=print)  # every rank reads: use one machine, or a shared disk
if found:
    if found.resume_invariants != invariants:
        sys.exit(f"error: {run_dir} holds a run with {found.resume_invariants}: choose another folder")
    for group, tensors in {"model": weights, "optimizer": momentum}.items():
        tensors.update({name: torch.tensor(array) for name, array in found.arrays(group).items()})
for step in range(found.step if found else 0, steps):
    local = torch.from_numpy(batches.indices(step))
    leaves = [tensor.requires_grad_() for tensor in weights.values()]
    loss = F.cross_entropy(F.linear(images[local], *leaves), labels[local], reduction="sum") / batches.size(step)
    for name, leaf, gradient in zip(weights, leaves, torch.autograd.grad(loss, leaves)):
        dist.all_reduce(gradient)  # sum the shards' parts of the mean over samples
        momentum[name] = 0.9 * momentum[name] + gradient
        weights[name] = leaf.detach() - LR * momentum[name]
    if world.rank == 0 and ((step + 1) % 20 == 0 or step + 1 == steps):
        arrays = [{name: tensor.numpy() for name, tensor in group.items()} for group in (weights, momentum)]
        groups = {"model": arrays[0], "optimizer": arrays[1]}
        checkpoint.save(run_dir, "own_loop", step + 1, groups, {}, invariants, keep=2)
checkpoint.finish()
if world.rank == 0:
    print(steps, checkpoint.weights_sha256({name: tensor.numpy() for name, tensor in weights.items()}), flush=True)
os._exit(0)  # skip Python's shutdown, which gloo's threads may abort
