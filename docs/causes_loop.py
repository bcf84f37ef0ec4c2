"""Train once with each cause that makes a loss depend on the world size, and once with none.

docs/causes.py starts this program at 1 and 2 ranks, and draws docs/causes.svg.
"""

import gc
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep.data import datasets
from samestep.torch import DataLoader, GlobalBatchSampler, exact, global_mean
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, RandomSampler, TensorDataset

EPOCHS, EXAMPLES, BATCH_SIZE, RATE = 2, 3999, 128, 0.03
CAUSES = ("batch", "mean", "padding", "order", "random", "statistics", "schedule", "float32", "none")


class Net(nn.Module):
    def __init__(self, has_norm, has_dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.norm = nn.BatchNorm2d(10) if has_norm else nn.Identity()
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.dropout = nn.Dropout() if has_dropout else nn.Identity()
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.norm(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


def read_digits(dtype):
    digits = datasets.load("mnist-5k", Path("data"))
    x = torch.tensor(digits.train_images[:EXAMPLES], dtype=dtype).unsqueeze(1) / 255
    return TensorDataset((x - 0.1307) / 0.3081, torch.tensor(digits.train_labels[:EXAMPLES]).long())


def make_loader(cause, train_set, rank, size):
    """Return the loader and its GlobalBatchSampler; the sampler is None if the cause replaces it.

    Args:
        cause: name of the cause, one of CAUSES.
        train_set: the training set, as `read_digits` returns it.
        rank: number of this rank, from 0.
        size: number of ranks.
    """
    if cause == "padding":
        padded = DistributedSampler(train_set, seed=1)
        return torch.utils.data.DataLoader(train_set, BATCH_SIZE // size, sampler=padded), None
    if cause == "order":
        own = RandomSampler(train_set, num_samples=-(-EXAMPLES // size), generator=torch.Generator().manual_seed(rank))
        return torch.utils.data.DataLoader(train_set, BATCH_SIZE // size, sampler=own), None
    batch_size = BATCH_SIZE * size if cause == "batch" else BATCH_SIZE
    sampler = GlobalBatchSampler(len(train_set), batch_size, seed=1)
    return DataLoader(train_set, batch_sampler=sampler), sampler


def train(cause, rank, size):
    torch.manual_seed(1)
    train_set = read_digits(torch.float32 if cause == "float32" else torch.float64)
    dtype = train_set.tensors[0].dtype
    loader, sampler = make_loader(cause, train_set, rank, size)
    is_exact = sampler is not None and cause not in ("random", "statistics")
    model = DistributedDataParallel(Net(is_exact or cause == "statistics", is_exact or cause == "random").to(dtype))
    if is_exact:
        exact(model, sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    seen = BATCH_SIZE // size if cause == "schedule" else BATCH_SIZE
    steps = EPOCHS * math.ceil(EXAMPLES / seen)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        if cause == "padding":
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            scores = model(x)
            loss = global_mean(F.cross_entropy(scores, y, reduction="sum"), len(y))
            update = F.cross_entropy(scores, y) if cause == "mean" else loss
            update.backward()
            optimizer.step()
            scheduler.step()
            if rank == 0:
                print(f"{cause} loss {loss.item():.17g}", flush=True)


def main():
    dist.init_process_group("gloo")
    for cause in CAUSES:
        train(cause, dist.get_rank(), dist.get_world_size())
        gc.collect()


if __name__ == "__main__":
    main()
    gc.collect()  # delete the DDP objects, because a thread of gloo may otherwise abort the process at exit
    dist.destroy_process_group()
