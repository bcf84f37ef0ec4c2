"""Train a small CNN on MNIST with PyTorch Lightning.

    bash scripts/run_mnist_lightning.sh 4                       # does all the set-up, restarts after a failure
    torchrun --standalone --nproc-per-node=4 apps/mnist_lightning/train.py
    python apps/mnist_lightning/train.py                        # one process
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python apps/mnist_lightning/train.py  # per machine

Every rank runs this file. The comment "collective" marks each call in which a rank waits for the other ranks, here and
in callback.py. Lightning's Trainer adds more collectives: barriers at the start of fit, and a barrier and a sum of
lengths for each loader in each epoch. It also adds a broadcast in each step, by which rank 0 would announce a SIGTERM.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from callback import RunCallback
from cluster import SamestepEnvironment
from data import EVAL_BATCH_SIZE, Data, load
from model import build_model
from options import parse
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy
from samestep import env, log
from samestep.data import datasets
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.torch import EvalSampler, GlobalBatchSampler, distributed, exact, reduction, updates, weights
from torch import Tensor, nn

if TYPE_CHECKING:
    from samestep.torch.virtual_ranks import GradientTree


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)


class Digits(pl.LightningModule):
    """Define the model, optimizer, training step and evaluation for Lightning."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: GlobalBatchSampler,
        eval_sampler: EvalSampler,
        tree: GradientTree | None,
    ) -> None:
        super().__init__()
        self.model = exact(model, sampler)  # draws a dropout mask for each row of the global batch
        self.optimizer = optimizer
        self.sampler = sampler
        self.eval_sampler = eval_sampler
        self.tree = tree
        self.automatic_optimization = tree is None  # otherwise training_step runs backward and updates
        self.eval_metrics: dict[str, Any] = {}  # metrics of the last validation

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return scores

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer  # this optimizer has the restored state

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss for Lightning's backward pass ("loss"), and this rank's summed loss ("loss_sum").

        The method scales "loss", so that DDP's mean of the gradients is the gradient of the global batch's mean loss.
        With --virtual-ranks, "loss" is absent, and "loss_sum" is the global batch's summed loss on rank 0, else 0.
        """
        if self.tree:
            return {"loss_sum": self.update_by_tree(self.tree, batch)}
        images, labels = batch
        scores = self(images)
        loss_sum = F.nll_loss(scores, labels, reduction="sum")
        # collective: DDP averages the gradients in backward()
        return {"loss": self.sampler.scale(loss_sum), "loss_sum": loss_sum.detach()}

    def update_by_tree(self, tree: GradientTree, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        for images, labels in self.sampler.micro_batches(batch):
            assert self.sampler.micro_batch is not None
            loss_sum = F.nll_loss(self(images), labels, reduction="sum")
            self.sampler.scale(loss_sum).backward()  # manual_backward() would make DDP reduce
            tree.add(self.sampler.micro_batch, loss_sum)
        loss = tree.all_reduce(self.sampler.step - 1)  # collective
        self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def on_validation_epoch_start(self) -> None:
        blocks = self.eval_sampler.num_blocks
        self.sums = torch.zeros(blocks, 3, dtype=torch.float64, device=self.device)  # a row per block of the test set

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        scores = self(images)
        block = self.eval_sampler.own_blocks[batch_idx]
        self.sums[block, 0] = F.nll_loss(scores, labels, reduction="sum")
        self.sums[block, 1] = (scores.argmax(dim=1) == labels).sum()
        self.sums[block, 2] = len(labels)

    def on_validation_epoch_end(self) -> None:
        """Set ``eval_metrics`` to the test set's mean loss, accuracy and number of examples."""
        dist.all_reduce(self.sums)  # collective
        loss_sum, correct, examples = self.sums.sum(dim=0).tolist()
        self.eval_metrics = {
            "test_loss": loss_sum / examples,
            "test_accuracy": correct / examples,
            "test_examples": int(examples),
        }


def build_trainer(run: Run, options: Options, device: torch.device, epochs: int, callback: pl.Callback) -> pl.Trainer:
    """Return a Trainer without Lightning's checkpoints and sampler.

    samestep replaces both, because Lightning's checkpoints are pickles and Lightning's sampler pads the data.
    """
    folder = options.run_dir / "log"
    loggers: list[Logger] = []
    if options.logger == "csv":
        loggers = [CSVLogger(folder, name="lightning")]
    elif options.logger == "tensorboard":
        loggers = [TensorBoardLogger(folder, name="lightning")]
    ranks = run.world.local_world_size
    if not ranks:  # the launcher does not set the local world size
        ranks = (run.world.local_rank or 0) + 1
    devices = ranks
    shared: list[torch.device] | None = None  # with None, the Trainer selects a GPU for each rank
    if options.share_gpu:
        devices = 1
        shared = [device] * ranks
    strategy = DDPStrategy(parallel_devices=shared, cluster_environment=SamestepEnvironment(run.world))
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=devices,
        num_nodes=run.world.node_count or 1,
        strategy=strategy,
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
    """Train from the first step, or from the checkpoint if the run resumes."""
    dtype = getattr(torch, options.dtype)
    rank = run.world.rank
    world_size = run.world.world_size
    model = build_model(options.model, options.dropout, dtype, options.seed).to(device)
    optimizer = build_optimizer(options, model)
    parts = Parts(
        load=partial(weights.load, model, optimizer),
        groups=partial(weights.groups, model, optimizer),
        watch=partial(updates.watch, dict(model.named_parameters())),
    )
    run.restore(distributed, parts)  # collective: rank 0 reads the checkpoint for all ranks

    # The global batches are the same at any world size. Each rank evaluates some blocks of the test set.
    train_set, test_set = load(options.dataset, options.data_dir, device, dtype)
    sampler = GlobalBatchSampler(
        len(train_set), options.global_batch_size, rank, world_size, options.seed, virtual_ranks=options.virtual_ranks
    )
    blocks = options.virtual_ranks or world_size  # Lightning raises an error on a rank without blocks
    eval_sampler = EvalSampler(len(test_set), EVAL_BATCH_SIZE, blocks=blocks, rank=rank, world_size=world_size)
    metadata = {"pytorch_lightning": version("pytorch-lightning"), **distributed.run_metadata(device, model)}
    run.start(sampler.batches, len(test_set), options.model, device.type, metadata)

    tree = reduction.gradient_tree(model, sampler.batches)  # None without --virtual-ranks
    module = Digits(model, optimizer, sampler, eval_sampler, tree)
    data = Data(run, sampler, eval_sampler, train_set, test_set)
    epochs = -(-run.last_step // len(sampler))  # the last epoch may be incomplete
    callback = RunCallback(run, data)
    trainer = build_trainer(run, options, device, epochs, callback)
    if run.first_step < run.last_step:
        trainer.fit(module, datamodule=data)  # collective: DDP's constructor, and the calls marked in callback.py
    else:
        trainer.validate(module, datamodule=data, verbose=False)  # collective
    run.finish(module.eval_metrics)  # collective: compare replicas


def main() -> None:
    options = parse(sys.argv[1:])
    app = Path(__file__).resolve().parent.name
    run = Run(app, options, env.detect(), monitor=Watchdog(), resolve_dataset=datasets.resolve)
    device = distributed.choose_device(options.device, run.world)
    distributed.set_threads(options.threads)
    distributed.rendezvous(run.world, device, options.timeout)  # collective
    train(run, options, device)
    dist.destroy_process_group()
    run.report("pytorch-lightning", version("pytorch-lightning"), distributed.backend(device), device.type)


if __name__ == "__main__":
    log.run(main)
