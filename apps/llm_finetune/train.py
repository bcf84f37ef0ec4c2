"""Fine-tune a language model, either all weights or LoRA matrices, with PyTorch DistributedDataParallel.

    bash scripts/run_llm_finetune.sh 2                    # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=2 apps/llm_finetune/train.py
    python apps/llm_finetune/train.py                     # one process

A step's loss is the mean over the target tokens of its global batch. The targets are the tokens of the assistant's
texts, and the end token of each text. The samples of a global batch, their micro-batches and the number of targets
depend only on the data, the options and the step. The step is therefore the same at any world size, and after a
restart.

Every rank runs this file. The comment "collective" marks each call in which a rank waits for the other ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import weights
from data import Samples, Tokenizer, idle_share, load, make_sampler
from model import TokenLoss, build_model, check_packing, describe, is_tiny, load_tokenizer, write
from options import parse
from peft import PeftModel
from samestep import env, log, schedules
from samestep.data.token_batches import TokenBatches, cut_by_tokens
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import shard
from samestep.torch import DataLoader, distributed, reduction, updates
from samestep.torch.token_sampler import GlobalTokenBatchSampler
from samestep.torch.weights import frozen_arrays
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from virtual_ranks import VirtualRanks

FINAL_RATE = 0.1  # learning rate at the end of the cosine schedule, as a fraction of --lr
SAMPLE_TOKENS = 26  # maximum number of tokens of each text that `show_samples` logs
SAMPLE_PROMPTS = ("Define lawyer.", "Define patience.")  # the embedded data contains neither word


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW optimizer of the trained weights, without weight decay for norms and biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=options.lr)


def learning_rate(options: Options, step: int, steps: int) -> float:
    """Return the learning rate of update ``step``, from 0, of a run with ``steps`` updates."""
    if step < options.warmup_steps or options.schedule == "constant":
        return float(options.lr * schedules.warmup(step, options.warmup_steps))
    done = step - options.warmup_steps
    total = max(1, steps - options.warmup_steps)
    return float(options.lr * schedules.cosine(done, total, final=FINAL_RATE))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def compute_gradients(
    model: DistributedDataParallel, sampler: GlobalTokenBatchSampler, tokens: Tensor, labels: Tensor
) -> Tensor:
    """Accumulate the gradients of this rank's micro-batches, and return the summed loss of these micro-batches."""
    losses: list[Tensor] = []
    count = max(1, len(sampler.batches.micro_batches(sampler.step - 1)))
    for micro_tokens, micro_labels in sampler.micro_batches((tokens, labels)):
        is_last = len(losses) == count - 1
        with nullcontext() if is_last else model.no_sync():  # DDP reduces only at the last micro-batch
            loss_sum = model(micro_tokens, micro_labels)
            # Scale to the mean over the global batch's targets: micro-batches have different numbers of targets.
            sampler.scale(loss_sum).backward()  # collective: DDP averages the gradients
        losses.append(loss_sum.detach().double())
    return torch.stack(losses).sum()


def train_step(
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: GlobalTokenBatchSampler,
    tokens: Tensor,
    labels: Tensor,
    compute_gradients: Callable[..., Tensor] = compute_gradients,
) -> Tensor:
    """Update once with this rank's part of a global batch, and return the loss that ``compute_gradients`` returns."""
    optimizer.zero_grad()
    loss_sum = compute_gradients(model, sampler, tokens, labels)  # collective
    nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)  # all ranks have equal gradients now
    optimizer.step()
    return loss_sum


@torch.inference_mode()
def evaluate(run: Run, model: TokenLoss, test_set: Samples, micro_tokens: int) -> dict[str, float]:
    """Return the mean loss over the test set's targets, its exponential (perplexity), and the number of examples."""
    model.eval()
    device = next(model.parameters()).device
    parts = cut_by_tokens(test_set.lengths, np.arange(len(test_set)), micro_tokens)
    sums = torch.zeros(len(parts), dtype=torch.float64, device=device)  # summed loss of each micro-batch
    first, end = shard(len(parts), run.world.rank, run.world.world_size)
    for k in range(first, end):
        tokens, labels = test_set.__getitems__(parts[k])
        sums[k] = model(tokens.to(device), labels.to(device))
        run.monitor.beat()
    model.train()
    dist.all_reduce(sums)  # collective
    mean = sums.sum().item() / int(test_set.targets.sum())
    return {"test_loss": mean, "perplexity": math.exp(min(mean, 700.0)), "test_examples": len(test_set)}


def train(run: Run, options: Options, device: torch.device) -> TokenBatches:
    """Train from the first step, or from the checkpoint if the run resumes, and return the global batches."""
    tokenizer = load_tokenizer(options)
    model = build_model(options, tokenizer).to(device)
    optimizer = build_optimizer(options, model)
    parts = Parts(
        load=partial(weights.load, options, model, optimizer),
        groups=partial(weights.groups, model, optimizer),
        watch=partial(updates.watch, weights.trained_parameters(model)),
        frozen=partial(frozen_arrays, model),
    )
    run.restore(distributed, parts)  # collective: rank 0 reads the checkpoint for all ranks

    # The global batches and micro-batches are the same at any world size.
    train_set, test_set = load(options, tokenizer)
    sampler = make_sampler(options, train_set, run.world.rank, run.world.world_size)
    loader = DataLoader(train_set, batch_sampler=sampler, seeded=False)
    metadata = distributed.run_metadata(device)
    run.start(sampler.batches, len(test_set), describe(options, model), device.type, metadata)

    if options.pack:
        check_packing(model)
    loss_model = TokenLoss(model, options.autocast == "bfloat16", options.pack)
    device_ids = [device] if device.type == "cuda" else None
    # All ranks have read the same weights. DDP with init_sync would broadcast all weights, including frozen weights.
    ddp = DistributedDataParallel(loss_model, device_ids, init_sync=False)  # collective
    reduction.register_ordered_hook(ddp, timer=run.timer)
    trained = nn.ParameterList(weights.trained_parameters(model).values())
    reduction.time_phases(trained, optimizer, run.timer)
    compute: Callable[..., Tensor] = compute_gradients
    if options.virtual_ranks:
        compute = VirtualRanks(ddp, sampler).compute_gradients
    if run.first_step == 0 and run.last_step > 0:
        before = evaluate(run, loss_model, test_set, options.micro_tokens)  # collective
        log.info(f"held-out loss {before['test_loss']:.4f} before training")

    for tokens, labels in run.batches(loader):  # from the restored step to the run's last step
        tokens = tokens.to(device)
        labels = labels.to(device)
        set_learning_rate(optimizer, learning_rate(options, run.step, options.epochs * len(sampler)))
        loss_sum = train_step(options, ddp, optimizer, sampler, tokens, labels, compute)  # collective
        actions = run.after_step(loss_sum)  # counts the step and records progress, without communication
        if actions.sync:  # a log line, evaluation or checkpoint is due, or an agreed number of steps has passed
            actions = run.sync()  # collective: exchange losses, stop requests and phase times
        if actions.log:
            evaluation: dict[str, float] = {}
            if actions.evaluate:
                evaluation = evaluate(run, loss_model, test_set, options.micro_tokens)  # collective
            run.log_metrics(evaluation)
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: compare replicas, and write the checkpoint (rank 0)

    metrics = run.eval_metrics or evaluate(run, loss_model, test_set, options.micro_tokens)  # collective
    run.finish(metrics)  # collective: compare replicas, and write the weights (rank 0)
    if run.world.rank == 0 and shows_samples(options):
        show_samples(model, tokenizer)
    return sampler.batches


def shows_samples(options: Options) -> bool:
    """Return whether the run logs sample texts at its end. --model tiny and --quiet disable these texts."""
    return not is_tiny(options) and not options.quiet


def show_samples(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Log the trained model's completion of each prompt, and the base model's completion if the model has LoRA."""
    for prompt in SAMPLE_PROMPTS:
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                log.info(f"{prompt}  before: {write(model, tokenizer, prompt, SAMPLE_TOKENS)}")
        log.info(f"{prompt}  after: {write(model, tokenizer, prompt, SAMPLE_TOKENS)}")


def main() -> None:
    options = parse(sys.argv[1:])
    app = Path(__file__).resolve().parent.name
    run = Run(app, options, env.detect(), monitor=Watchdog())
    device = distributed.choose_device(options.device, run.world)
    distributed.set_threads(options.threads)
    distributed.rendezvous(run.world, device, options.timeout)  # collective
    batches = train(run, options, device)
    dist.destroy_process_group()
    targets = batches.num_losses_before(batches.steps_per_epoch)
    counts = {"train_tokens": batches.num_tokens, "train_targets": targets, "idle_share": round(idle_share(batches), 3)}
    run.report("torch", torch.__version__, distributed.backend(device), device.type, **counts)


if __name__ == "__main__":
    log.run(main)
