"""Train a small CNN on MNIST while ranks join and leave, with torchft's lighthouse and virtual ranks.

    bash scripts/run_mnist_elastic.sh 4                   # does all the set-up
    kill -9 PID                                           # the launcher restarts this rank; others continue
    kill -TERM PID                                        # this rank leaves
    python apps/mnist_elastic/join.py RUN_DIR             # adds a rank

launcher.py starts this file for each rank. The comment "collective" marks each call in which a rank waits for the
other ranks. If a rank is lost during the call, the other ranks regroup and repeat the step.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Split, load
from membership import Launcher, Members, MemberWatchdog, choose_device, run_metadata
from model import build_model
from options import parse
from samestep import ConfigError, log
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.options import Options
from samestep.run import Parts, Run
from samestep.sharding import GlobalBatches, eval_batches, shard, step_seed
from samestep.torch import FixedRows, distributed, exact, weights
from samestep.torch.virtual_ranks import GradientTree
from torch import nn

EVAL_BATCH_SIZE = 250  # largest evaluation batch of a rank, in examples


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


@torch.inference_mode()
def evaluate(run: Run, model: nn.Module, test_set: Split, dtype: torch.dtype, members: Members) -> dict[str, float]:
    """Return the test set's mean loss, accuracy and number of examples. Each example counts once, on one rank."""
    model.eval()
    blocks = run.options.virtual_ranks or 1
    batches = eval_batches(len(test_set.labels), EVAL_BATCH_SIZE, blocks)
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device=test_set.labels.device)  # a row per batch
    first, end = shard(len(batches), members.rank, members.world_size)
    for k in range(first, end):
        images, labels = test_set.batch(batches[k], dtype)
        scores = model(images)
        sums[k, 0] = F.nll_loss(scores, labels, reduction="sum")
        sums[k, 1] = (scores.argmax(dim=1) == labels).sum()
        sums[k, 2] = len(labels)
        run.monitor.beat()
    model.train()
    members.all_reduce(sums)  # collective
    loss_sum, correct, examples = sums.sum(dim=0).tolist()
    return {"test_loss": loss_sum / examples, "test_accuracy": correct / examples, "test_examples": int(examples)}


def train(run: Run, options: Options, device: torch.device, launcher: Launcher) -> None:
    """Train with the members of the group until the last step, or until a stop request for this rank."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    parts = Parts(load=partial(weights.load, model, optimizer), groups=partial(weights.groups, model, optimizer))
    run.restore(launcher, parts)  # collective: the launcher reads the checkpoint
    train_set, test_set = load(options.dataset, options.data_dir, device)
    batches = GlobalBatches(
        len(train_set.labels), options.global_batch_size, options.seed, virtual_ranks=options.virtual_ranks
    )
    metadata = run_metadata(device, model)
    run.start(batches, len(test_set.labels), options.model, device.type, metadata)

    rows = FixedRows(options.virtual_ranks)
    exact(model, rows)
    members = Members(launcher, run, parts, device)
    for step in members.steps():  # yields a step again if a member was lost
        with members.attempt():
            if members.regroup_due:
                members.regroup()  # collective: may copy another member's state, including its step
                batches = replace(batches, rank=members.rank, world_size=members.world_size)
                tree = GradientTree(
                    model,
                    batches,
                    [members.checks],
                    all_to_all=members.all_to_all,
                    all_gather=members.all_gather,
                )
                continue
            if members.evaluation_due:
                evaluation = evaluate(run, model, test_set, dtype, members)  # collective
                members.record(evaluation)
                continue
            optimizer.zero_grad()
            for micro_batch in batches.micro_batches(step):  # this rank's sub-shards
                indices = batches.indices(step, micro_batch)
                images, labels = train_set.batch(indices, dtype)
                # Dropout masks depend on the row of the global batch and on this seed, which is the same on all ranks.
                torch.manual_seed(step_seed(options.seed, step))
                first, size = batches.rows(step, micro_batch)
                rows.set(step, first, len(images), size)
                scores = model(images)
                loss = F.nll_loss(scores, labels, reduction="sum")
                members.note(step, loss)
                (loss / size).backward()
                tree.add(micro_batch, loss)
            tree.all_reduce(step)  # collective
            members.check(step, batches.num_micro_batches(step))
            optimizer.step()
            members.after_step(step)  # counts the step, and sends the launcher log lines and checkpoints


def main() -> None:
    options = parse(sys.argv[1:])
    info = JobInfo.from_environ(os.environ)
    if info.rank is None or info.ranks is None:
        raise ConfigError("a rank needs its launcher: bash scripts/run_mnist_elastic.sh N")
    rank = info.rank
    world_size = info.ranks
    # The launcher is rank 0 of the Run, and writes the run's files.
    world = World(rank, world_size, rank, world_size, 0, 1, launcher="torchft")
    run = Run(Path(__file__).resolve().parent.name, options, world, MemberWatchdog())
    device = choose_device(options, world)
    distributed.set_threads(options.threads)
    launcher = Launcher(rank, run_metadata(device))
    train(run, options, device, launcher)
    run.monitor.stop()


if __name__ == "__main__":
    log.run(main)
