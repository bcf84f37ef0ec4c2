"""Train a small GPT with PyTorch FSDP2 and tensor parallelism.

    bash scripts/run_gpt_fsdp.sh 4                        # does all the set-up, restarts after a failure
    bash scripts/run_gpt_fsdp.sh 4 --mesh 2x2             # two ranks share the hidden layers of a block
    torchrun --standalone --nproc-per-node=4 apps/gpt_fsdp/train.py
    python apps/gpt_fsdp/train.py                         # one process

Every rank runs this file, and holds a shard of the weights, gradients and optimizer state. The comment "collective"
marks each call in which a rank waits for the other ranks. FSDP gathers a block's weights in the forward and backward
passes, and reduces its gradients in the backward pass. Tensor parallelism reduces activations within a block.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import cast

import distributed
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weights
from data import IGNORED, load, markov_bits, read
from model import GPT, build_model
from options import Options, parse
from samestep import env, log, schedules
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharded.shards import Shards
from samestep.step_timer import COMPUTE, StepTimer
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, exact, updates
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

EVAL_BATCH_SIZE = 32  # largest evaluation batch of a data-parallel rank, in windows


def build_optimizer(options: Options, model: GPT) -> torch.optim.Optimizer:
    """Return a fused AdamW, without weight decay for norms.

    Parameters are grouped by mesh, because one fused update accepts only tensors of one mesh.
    """
    groups: dict[tuple[float, int], list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        decay = options.weight_decay if parameter.ndim > 1 else 0.0
        mesh_dimensions = cast(DTensor, parameter).device_mesh.ndim
        groups.setdefault((decay, mesh_dimensions), []).append(parameter)
    settings = [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()]
    return torch.optim.AdamW(settings, lr=options.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(options: Options, step: int, steps: int) -> float:
    """Return the learning rate of update ``step``, from 0, of a run with ``steps`` updates."""
    if step < options.warmup_steps or options.schedule == "constant":
        return float(options.lr * schedules.warmup(step, options.warmup_steps))
    done = step - options.warmup_steps
    total = max(1, steps - options.warmup_steps)
    return float(options.lr * schedules.cosine(done, total, final=0.1))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def train_step(
    options: Options,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    sampler: GlobalBatchSampler,
    windows: tuple[Tensor, Tensor],
    mesh: DeviceMesh,
    timer: StepTimer,
) -> Tensor:
    """Update once with this rank's windows of a global batch, and return the sum of the windows' mean losses per byte.

    FSDP divides gradients by the number of data-parallel ranks, although shards and micro-batches may differ in size or
    be empty. The function therefore scales each loss, so that the gradients are the mean over the global batch. FSDP
    reduces gradients after each micro-batch, because a rank would otherwise hold the unsharded gradients of all blocks.
    """
    dtype = getattr(torch, options.dtype)
    losses = []
    optimizer.zero_grad()
    for tokens, targets in sampler.micro_batches(windows):
        loss = loss_of(model, tokens, targets, dtype) / options.context  # collective: FSDP gathers
        timer.mark(COMPUTE)
        sampler.scale(loss).backward()  # collective: FSDP averages the gradients
        losses.append(loss.detach())
    if options.clip_norm:
        clip(model, mesh, options.clip_norm)  # collective
    optimizer.step()
    return torch.stack(losses).sum()


def loss_of(model: GPT, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the loss summed over all ``targets`` [m, length], the bytes that follow ``tokens``. m may be 0."""
    if len(tokens) == 0:  # add a window without targets: tensor-parallel ranks may hang on an empty batch
        tokens = F.pad(tokens, (0, 0, 0, 1))
        targets = F.pad(targets, (0, 0, 0, 1), value=IGNORED)
    scores = model(tokens).to(dtype)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def clip(model: GPT, mesh: DeviceMesh, most: float) -> None:
    """Scale gradients down to a total norm of at most ``most``. Copies of a shard count once."""
    square = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    parts = []
    for parameter in model.parameters():
        if not isinstance(parameter.grad, DTensor):
            continue
        local, _, is_copy = weights.place(parameter.grad, mesh)
        parts.append(local)
        if not is_copy:
            square += torch.linalg.vector_norm(local, dtype=torch.float64).square()
    dist.all_reduce(square)  # collective
    norm = square.sqrt().item()
    torch._foreach_mul_(parts, min(1.0, most / (norm + 1e-6)))


@torch.no_grad()
def evaluate(run: Run, model: GPT, loader: DataLoader, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, float]:
    """Return the test set's mean loss per byte, bits per byte and number of bytes. Each byte counts once.

    All ranks run the same number of forward passes, because a rank waits for other ranks in each pass.
    """
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens, targets in loader:
        loss = loss_of(model, tokens, targets, dtype)  # collective: FSDP gathers
        if mesh.get_local_rank("tp") == 0:  # the other tensor-parallel ranks have the same loss
            count = (targets != IGNORED).sum()
            sums += torch.stack([loss.double(), count.double()])
        run.monitor.beat()
    model.train()
    # FSDP keeps the last gathered weights if no backward pass follows. `weights.place` would reject gathered weights.
    cast(FSDPModule, model).reshard()
    dist.all_reduce(sums)  # collective
    loss_sum, examples = sums.tolist()
    mean = loss_sum / examples
    return {"test_loss": mean, "bits_per_byte": mean / math.log(2), "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train from the first step, or from the checkpoint if the run resumes."""
    dtype = getattr(torch, options.dtype)
    mesh = distributed.make_mesh(options, device)
    model = build_model(options, dtype, mesh)
    optimizer = build_optimizer(options, model)
    parts = Parts(
        load=partial(weights.load, model, optimizer, mesh),
        groups=partial(weights.groups, model, optimizer, mesh),
        watch=partial(updates.watch, dict(model.named_parameters())),
    )
    run.restore(distributed, parts)  # collective

    # The global batches are the same at any mesh. Each data-parallel rank evaluates some blocks of the test set.
    train_set, test_set = load(options, device)
    sampler = GlobalBatchSampler(
        len(train_set),
        options.global_batch_size,
        seed=options.seed,
        accumulate=options.accumulate,
        group=mesh["dp"],
    )
    loader = DataLoader(train_set, batch_sampler=sampler, seeded=False)
    eval_sampler = EvalSampler(len(test_set), EVAL_BATCH_SIZE, even=True, group=mesh["dp"])
    eval_loader = DataLoader(test_set, batch_sampler=eval_sampler, seeded=False)
    counts = mesh.get_local_rank("tp") == 0  # tensor-parallel ranks have the same loss, so only the first counts
    shape = "x".join(map(str, mesh.shape))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    metadata = {**distributed.run_metadata(device, model), "mesh": shape}
    description = f"a GPT of {parameters:,} parameters, mesh {shape},"
    run.start(sampler.batches, test_set.bytes, description, device.type, metadata)

    exact(model, sampler)  # draws a dropout mask for each row of the global batch
    distributed.time_phases(model, optimizer, run.timer)
    for windows in run.batches(loader):  # from the restored step to the run's last step
        set_learning_rate(optimizer, learning_rate(options, run.step, options.epochs * len(sampler)))
        loss = train_step(options, model, optimizer, sampler, windows, mesh, run.timer)  # collective
        actions = run.after_step(loss * counts)  # counts the step and records progress, without communication
        if actions.sync:  # a log line, evaluation or checkpoint is due, or an agreed number of steps has passed
            actions = run.sync()  # collective: exchange losses, stop requests and phase times
        if actions.log:
            evaluation: dict[str, float] = {}
            if actions.evaluate:
                evaluation = evaluate(run, model, eval_loader, mesh, dtype)  # collective
            run.log_metrics(evaluation)
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: each rank writes its part

    metrics = run.eval_metrics or evaluate(run, model, eval_loader, mesh, dtype)  # collective
    run.finish(metrics)  # collective: rank 0 writes all weights to one file


def main() -> None:
    options = parse(sys.argv[1:])
    app = Path(__file__).resolve().parent.name
    run = Run(app, options, env.detect(), monitor=Watchdog(), storage=Shards())
    device = distributed.choose_device(options.device, run.world)
    distributed.rendezvous(run.world, device, options.timeout)  # collective
    train(run, options, device)
    dist.destroy_process_group()
    fields = {}
    if run.world.rank == 0:
        fields["markov_bits_per_byte"] = markov_bits(read(options))
    run.report("torch", torch.__version__, distributed.backend(device), device.type, **fields)


if __name__ == "__main__":
    log.run(main)
