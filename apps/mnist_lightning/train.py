"""Train a small CNN on MNIST with PyTorch Lightning.

    bash scripts/run_mnist_lightning.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/mnist_lightning/train.py
    python apps/mnist_lightning/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/mnist_lightning/train.py   # one a machine

Every rank runs this file. They talk at nine places, each marked here or in callback.py: at the rendezvous, when they
restore a checkpoint, when DDP is built (in fit) and when its sums are ordered, at each step for the gradients (in
backward), at each log line for the loss, at each evaluation, before a checkpoint is saved, and at the end: do all hold
the same weights? Lightning's Trainer adds some barriers as fit begins; at each epoch a barrier and a sum of the lengths
for either loader; and at each step a broadcast by which rank 0 would tell of a SIGTERM.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weights
from callback import RunCallback
from cluster import SamestepEnvironment
from data import Batch, Data, load
from model import build_model
from options import parse
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy
from samestep import env, log
from samestep.options import Options
from samestep.run import Run
from samestep.sharding import GlobalBatches, Rows, step_seed
from torch import Tensor, nn

APP = Path(__file__).resolve().parent.name


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


class Digits(pl.LightningModule):
    """What Lightning trains: the model, its optimizer, the step they take, and its evaluation."""

    def __init__(self, options: Options, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.options, self.model, self.optimizer = options, model, optimizer
        self.tested: dict[str, Any] = {}  # what the last validation found

    def forward(self, images: Tensor, rows: Rows) -> Tensor:
        scores: Tensor = self.model(images, rows)
        return scores

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer  # with the state that was restored

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss of this rank's shard of a global batch; beside it the shard's summed loss.

        The gradient must be the mean over the global batch's *samples*, although shards may differ in size. DDP
        averages over ranks, so each rank's summed loss is scaled by world_size / rows.global_size. A rank without
        samples takes part with a gradient of zeros.
        """
        ranks.generator(self.device).manual_seed(step_seed(self.options.seed, batch.step))
        loss_sum = F.nll_loss(self(batch.images, batch.rows), batch.labels, reduction="sum")
        # Lightning calls its backward(). Ranks talk: DDP adds up the gradients.
        return {"loss": loss_sum * (dist.get_world_size() / batch.rows.global_size), "loss_sum": loss_sum.detach()}

    def on_validation_epoch_start(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        scores = self(images, Rows(0, len(images)))
        self.sums[0] += F.nll_loss(scores, labels, reduction="sum")
        self.sums[1] += (scores.argmax(dim=1) == labels).sum()
        self.sums[2] += len(labels)

    def on_validation_epoch_end(self) -> None:
        """Loss and accuracy over the whole test set, each example counted once on exactly one rank."""
        dist.all_reduce(self.sums)  # ranks talk
        loss_sum, correct, examples = self.sums.tolist()
        self.tested = {"test_loss": loss_sum / examples, "test_accuracy": correct / examples}
        self.tested["test_examples"] = int(examples)


def build_trainer(run: Run, options: Options, device: torch.device, epochs: int, callback: pl.Callback) -> pl.Trainer:
    """Lightning's Trainer, without what samestep does: its checkpoints are pickles, its sampler pads."""
    folder, loggers = options.run_dir / "log", list[Logger]()
    if options.logger == "csv":
        loggers = [CSVLogger(folder, name="lightning")]
    elif options.logger == "tensorboard":
        loggers = [TensorBoardLogger(folder, name="lightning")]
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=run.world.local_world_size or (run.world.local_rank or 0) + 1,
        num_nodes=run.world.node_count or 1,
        strategy=DDPStrategy(cluster_environment=SamestepEnvironment(run.world)),
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        logger=loggers or False,
        log_every_n_steps=options.log_every,
        callbacks=[callback],
        default_root_dir=options.run_dir,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_autolog_hparams=False,
    )


def train(run: Run, options: Options, device: torch.device) -> None:
    """Train, or go on training."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    run.restore(ranks, partial(weights.load, model, optimizer))  # ranks talk: rank 0 reads, all load the same bytes
    training, test = load(options.dataset, options.data_dir, device)
    n = len(training.labels)
    batches = GlobalBatches(n, options.global_batch_size, options.seed, dist.get_rank(), dist.get_world_size())
    facts = {"pytorch_lightning": version("pytorch-lightning"), **ranks.facts(device)}
    run.begin(batches, len(test.labels), options.model, device.type, facts)

    module, data = Digits(options, model, optimizer), Data(run, batches, training, test, dtype)
    epochs = -(-run.stop // batches.steps_per_epoch)  # the last of them may be cut
    trainer = build_trainer(run, options, device, epochs, RunCallback(run, data, device))
    if run.start < run.stop:
        trainer.fit(module, datamodule=data)  # ranks talk: DDP is built, and all that callback.py has marked
    else:
        trainer.validate(module, datamodule=data, verbose=False)  # ranks talk
    run.finish(ranks, weights.model_arrays(model), module.tested)  # ranks talk: all must hold the same weights


def main() -> None:
    options = parse(sys.argv[1:])
    run = Run(APP, options, env.detect(os.environ))
    device = ranks.choose_device(options.device, run.world)
    ranks.rendezvous(run.world, device, options.timeout)  # ranks talk
    train(run, options, device)
    dist.destroy_process_group()
    run.report("pytorch-lightning", version("pytorch-lightning"), ranks.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
