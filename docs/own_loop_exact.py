"""Train a small CNN on random images with six parts of the kit: torchrun --nproc-per-node 2 own_loop_exact.py."""

import argparse
import gc
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep.torch import Checkpoints, DataLoader, EvalSampler, GlobalBatchSampler, exact, global_mean
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset


class Images(Dataset):
    def __init__(self, count, seed, train, dtype):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 16, 16, generator=generator).to(dtype)
        self.labels = (self.images.mean((2, 3)) > 0).long() @ torch.tensor([1, 2, 4])
        self.train = train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.train and random.random() < 0.5:
            image = image.flip(2)
        return image, self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x))).mean((2, 3))
        return self.fc(self.dropout(x))


def evaluate(model, loader):
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            totals += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(totals)
    model.train()
    return totals.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    os.makedirs(args.out, exist_ok=True)
    dtype = getattr(torch, args.dtype)
    train_set, test_set = Images(1000, 1, True, dtype), Images(999, 2, False, dtype)
    sampler = GlobalBatchSampler(len(train_set), args.batch_size)
    loader = DataLoader(train_set, batch_sampler=sampler, num_workers=args.workers)
    test_loader = DataLoader(test_set, batch_sampler=EvalSampler(len(test_set), 100), num_workers=args.workers)
    model = exact(DDP(Net().to(dtype)), sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    checkpoint = Checkpoints(args.out, every=20, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    checkpoint.restore()

    for epoch in range(sampler.epoch, args.epochs):
        for i, (x, y) in enumerate(loader, sampler.batch):
            optimizer.zero_grad()
            loss = global_mean(F.cross_entropy(model(x), y, reduction="sum"), len(y))
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpoint.step()
            if rank == 0:
                print(f"epoch {epoch} step {i} loss {loss.item():.17g}", flush=True)
        correct, count = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct / count:.4f} ({correct:.0f} of {count:.0f})", flush=True)
            torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))


if __name__ == "__main__":
    main()
    gc.collect()  # delete the DDP object, because a thread of gloo may otherwise abort the process at exit
    dist.destroy_process_group()
