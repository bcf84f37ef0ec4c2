"""Train a small CNN with Lightning: torchrun --nproc-per-node 2 with_lightning.py."""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from images import Images, Net
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self, lr, dtype):
        super().__init__()
        self.lr = lr
        self.net = Net().to(dtype)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.print(f"loss {loss.item():.17g}", flush=True)
        return loss

    def on_validation_epoch_start(self):
        self.totals = torch.zeros(2, dtype=torch.float64)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.totals += torch.tensor([(self.net(x).argmax(1) == y).sum(), len(y)])

    def on_validation_epoch_end(self):
        correct, count = self.all_gather(self.totals).reshape(-1, 2).sum(0).tolist()
        self.print(f"accuracy {correct / count:.4f} ({correct:.0f} of {count:.0f})", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    train_set, test_set = Images(1000, 1, True, dtype), Images(999, 2, False, dtype)
    loader = DataLoader(train_set, args.batch_size // world_size, shuffle=True)
    test_loader = DataLoader(test_set, 100)
    last = os.path.join(args.out, "last.ckpt")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=args.epochs,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=20, save_last=True, save_top_k=0)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(args.lr, dtype), loader, test_loader, ckpt_path=last if os.path.exists(last) else None)
    if trainer.is_global_zero:
        torch.save(trainer.lightning_module.net.state_dict(), os.path.join(args.out, "model.pt"))


if __name__ == "__main__":
    main()
