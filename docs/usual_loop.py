"""Train a CNN on digits with DistributedDataParallel, in global batches of 128 at any world size that divides 128."""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep.data import datasets
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout2d = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.dropout = nn.Dropout()
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout2d(self.conv2(x)), 2)).flatten(1)
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


def examples(images, labels, dtype):
    x = torch.tensor(images, dtype=dtype).unsqueeze(1) / 255
    return TensorDataset((x - 0.1307) / 0.3081, torch.tensor(labels).long())


def load_snapshot(model, path):
    if not path.exists():
        return 0
    weights, epoch = torch.load(path, weights_only=True)
    model.module.load_state_dict(weights)
    return epoch


def evaluate(model, loader):
    model.eval()
    totals = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            totals += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(totals)
    model.train()
    return totals.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default="out")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    args.out.mkdir(parents=True, exist_ok=True)
    snapshot = args.out / "snapshot.pt"
    dtype = getattr(torch, args.dtype)
    digits = datasets.load("mnist-5k", Path("data"))
    train_set = examples(digits.train_images, digits.train_labels, dtype)
    test_set = examples(digits.test_images, digits.test_labels, dtype)

    sampler = DistributedSampler(train_set, seed=1)
    loader = DataLoader(train_set, 128 // size, sampler=sampler)
    test_loader = DataLoader(test_set, 250, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(Net().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    first_epoch = load_snapshot(model, snapshot)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"epoch {epoch} step {i} loss {mean.item() / size:.17g}", flush=True)
        correct, count = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct / count:.4f} ({correct:.0f} of {count:.0f})", flush=True)
            torch.save((model.module.state_dict(), epoch + 1), snapshot)


if __name__ == "__main__":
    main()
    gc.collect()  # frees DDP: a thread of gloo may otherwise abort the exit
    dist.destroy_process_group()
