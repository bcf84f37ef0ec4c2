"""Train a small GPT with PyTorch FSDP2 and tensor parallelism: no rank holds the model, and the step is the same.

    bash scripts/run_gpt_fsdp.sh 4                        # does all the set-up, restarts after a failure
    bash scripts/run_gpt_fsdp.sh 4 --mesh 2x2             # two ranks share the hidden layers of a block
    torchrun --standalone --nproc-per-node=4 apps/gpt_fsdp/train.py
    python apps/gpt_fsdp/train.py                         # one process

Every rank runs this file, and holds its part of weights, gradients and optimizer state. They talk at nine places, each
marked: at the rendezvous, when a checkpoint is restored, at each step in the forward and backward passes (FSDP gathers
a block and adds up its gradients; tensor parallelism adds up what a block's parts computed) and to clip, at each log
line for the loss, at each evaluation, when a checkpoint is saved, and at the end, when rank 0 gathers the weights.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weights
from data import IGNORED, Windows, count_of, load, markov_bits, read
from model import GPT, build_model
from options import parse
from samestep import env, log, schedules
from samestep.options import Options
from samestep.phases import Phases
from samestep.sharded import ShardedRun
from samestep.sharding import GlobalBatches, shard
from samestep.watchdog import Watchdog
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

APP = Path(__file__).resolve().parent.name
EVALUATION_BATCH = 32  # windows at a time; of no influence on the result


def build_optimizer(options: Options, model: GPT) -> torch.optim.Optimizer:
    """AdamW, fused: one pass, and no copies. Norms are not decayed: they only scale.

    Weights that tensor parallelism cuts, too, have a group of their own, as one call takes tensors of one mesh.
    """
    groups: dict[tuple[float, int], list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        decay = options.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, cast(DTensor, parameter).device_mesh.ndim), []).append(parameter)
    settings = [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()]
    return torch.optim.AdamW(settings, lr=options.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(options: Options, step: int, steps: int) -> float:
    """Of update ``step`` of ``steps``: a function of the step has nothing to save, and nothing to forget."""
    if step < options.warmup_steps or options.schedule == "constant":
        return float(options.lr * schedules.warmup(step, options.warmup_steps))
    along = step - options.warmup_steps, max(1, steps - options.warmup_steps)
    return float(options.lr * schedules.cosine(*along, final=0.1))


def train_step(
    options: Options,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    training: Windows,
    batches: GlobalBatches,
    step: int,
    mesh: DeviceMesh,
    phases: Phases,
) -> Tensor:
    """One update with this rank's shard of a global batch; returns the sum of its windows' mean losses.

    The gradient must be the mean over the global batch's *samples*, although shards and micro-batches may differ in
    size. FSDP averages over data-parallel ranks, so each summed loss is scaled by their number / the global batch, and
    micro-batches simply add up. Each is reduced at once: until then a rank would hold the whole model's gradients.
    """
    losses = []
    optimizer.zero_grad()
    count = count_of(options, batches, step)
    for k in range(count):
        tokens, targets = training.batch(batches.indices(step, (k, count)))
        phases.end("input")
        loss = loss_of(model, tokens, targets, getattr(torch, options.dtype)) / options.context  # ranks talk
        phases.end("computing")
        (loss * (mesh.size(0) / batches.size(step))).backward()  # ranks talk: FSDP adds up the gradients
        losses.append(loss.detach())
    if options.clip_norm:
        clip(model, mesh, options.clip_norm)  # ranks talk
    optimizer.step()
    return torch.stack(losses).sum()


def loss_of(model: GPT, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Summed over all targets: bytes [m, length] and what follows them."""
    scores = model(tokens).to(dtype)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def clip(model: GPT, mesh: DeviceMesh, most: float) -> None:
    """Scale the gradient down to a norm of ``most``: that of the whole, to which each rank adds what it alone has."""
    placed = [weights.place(each.grad, mesh) for each in model.parameters() if isinstance(each.grad, DTensor)]
    square = torch.zeros((), dtype=torch.float64, device=placed[0][0].device)
    for local, _, is_copy in placed:
        if not is_copy:
            square += torch.linalg.vector_norm(local, dtype=torch.float64).square()
    dist.all_reduce(square)  # ranks talk
    torch._foreach_mul_([local for local, *_ in placed], min(1.0, most / (square.sqrt().item() + 1e-6)))


@torch.no_grad()
def evaluate(model: GPT, test: Windows, mesh: DeviceMesh, dtype: torch.dtype, watchdog: Watchdog) -> dict[str, Any]:
    """Loss and bits a byte over the held-out part, each byte counted once; all ranks make as many passes."""
    model.eval()
    size, rank = mesh.size(0), mesh.get_local_rank("dp")
    first, last = shard(len(test), rank, size)
    sums = torch.zeros(2, dtype=torch.float64, device=test.device)
    for begin in range(first, first + -(-len(test) // size), EVALUATION_BATCH):
        tokens, targets = test.batch(np.arange(begin, min(begin + EVALUATION_BATCH, last)))
        loss = loss_of(model, tokens, targets, dtype)  # ranks talk: FSDP gathers
        if mesh.get_local_rank("tp") == 0:  # those beside it have the same
            sums += torch.stack([loss.double(), (targets != IGNORED).sum().double()])
        watchdog.beat()
    model.train()
    # Without a backward pass FSDP keeps what it gathered last: a checkpoint would be of all of it.
    cast(FSDPModule, model).reshard()
    dist.all_reduce(sums)  # ranks talk
    loss, examples = sums.tolist()
    return {
        "test_loss": loss / examples,
        "bits_per_byte": loss / examples / math.log(2),
        "test_examples": int(examples),
    }


def train(run: ShardedRun, options: Options, device: torch.device) -> None:
    """Train, or go on training."""
    dtype, mesh = getattr(torch, options.dtype), ranks.make_mesh(options, device)
    model = build_model(options, dtype, mesh)
    optimizer = build_optimizer(options, model)
    run.restore(ranks, partial(weights.load, model, optimizer, mesh))  # ranks talk: each reads what it needs
    training, test = load(options, device)
    n, size = len(training), options.global_batch_size
    batches = GlobalBatches(n, size, options.seed, mesh.get_local_rank("dp"), mesh.size(0))
    counted = mesh.get_local_rank("tp") == 0  # of ranks that compute the same, one tells it
    shape = "x".join(map(str, mesh.shape))
    facts = {**ranks.facts(device), "mesh": shape}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    run.begin(batches, test.bytes, f"a GPT of {parameters:,} parameters, mesh {shape},", device.type, facts)

    ranks.time_phases(model, optimizer, run.phases)
    sum_since = torch.zeros((), dtype=torch.float64, device=device)  # this rank's summed loss since the last record
    for step in range(run.start, run.stop):
        run.phases.begin()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, options.epochs * batches.steps_per_epoch)
        loss_sum = train_step(options, model, optimizer, training, batches, step, mesh, run.phases)  # ranks talk
        loss_sum *= counted
        sum_since += loss_sum
        due = run.done(step)
        if due.talk:
            sums = torch.tensor([loss_sum, sum_since, *run.says()], dtype=torch.float64, device=device)
            dist.all_reduce(sums)  # ranks talk
            due = run.heard(due, sums[2:].tolist())
        if due.log:
            sum_since.zero_()
            tested = evaluate(model, test, mesh, dtype, run.watchdog) if due.test else {}  # ranks talk
            run.record(sums[0].item(), sums[1].item(), tested)
        if due.save:
            run.save(ranks, weights.groups(model, optimizer, mesh))  # ranks talk: each writes its part

    tested = run.tested or evaluate(model, test, mesh, dtype, run.watchdog)  # ranks talk
    run.finish(ranks, weights.model_pieces(model, mesh), tested)  # ranks talk: rank 0 gathers from the checkpoint


def main() -> None:
    options = parse(sys.argv[1:])
    run = ShardedRun(APP, options, env.detect(os.environ))
    device = ranks.choose_device(options.device, run.world)
    ranks.rendezvous(run.world, device, options.timeout)  # ranks talk
    train(run, options, device)
    dist.destroy_process_group()
    facts = {}
    if run.world.rank == 0:
        facts["markov_bits_per_byte"] = markov_bits(read(options))
    run.report("torch", torch.__version__, ranks.backend(device), device.type, **facts)


if __name__ == "__main__":
    log.run(main)
