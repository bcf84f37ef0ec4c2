"""Train with PyTorch Lightning, as its guides recommend. The first process is rank 0; Lightning starts all other ranks.

The module comes from the tutorial "PyTorch Lightning CIFAR10". The Trainer accumulates and clips gradients. The length
of the schedule is ``estimated_stepping_batches``, as documented. The batch size of a device follows the
page "GPU training (FAQ)", which describes how distributed training can "work exactly the same as single GPU training".
"""

from __future__ import annotations

import os
from typing import Any

import common

common.torchvision_that_imports()  # Lightning imports torchvision if it is installed
import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from setting import Cifar, Net, Record, arguments  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim.lr_scheduler import CosineAnnealingLR  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchmetrics.functional import accuracy  # noqa: E402


class LitNet(L.LightningModule):  # type: ignore[misc]  # mypy runs without Lightning
    def __init__(self, plain: bool, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.model = Net(plain)
        self.record = Record()
        self.examples = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels, indices = batch
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        self.record.add(self.trainer.global_step, indices, loss, self.optimizers().param_groups[0]["lr"])
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels, _ = batch
        predictions = self.model(images).argmax(dim=1)
        self.log("test_acc", accuracy(predictions, labels, task="multiclass", num_classes=10), sync_dist=True)
        self.examples += len(labels)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
        scheduler = CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    options = arguments()
    L.seed_everything(options.seed)
    batch_size = options.batch // options.accumulate // options.ranks
    # With the strategy ddp, Lightning adds its DistributedSampler to these loaders.
    training = DataLoader(Cifar(True, not options.plain), batch_size, shuffle=True)
    test = DataLoader(Cifar(False, False), batch_size)
    L.seed_everything(options.seed)
    model = LitNet(options.plain, options.lr)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.ranks > 1 or options.switches else "auto",
        precision="64-true",
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        default_root_dir=options.out,
        # The comparison does not use these features.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, training)
    tested = trainer.test(model, test, verbose=False)
    examples = int(trainer.strategy.reduce(torch.tensor(model.examples), reduce_op="sum"))
    model.record.write(options.out, trainer.global_rank, tested[0]["test_acc"], examples)
    trainer.strategy.barrier()  # the job ends when rank 0 ends


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may abort a normal exit
