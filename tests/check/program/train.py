"""A sound script that does not use samestep: torchrun --nproc-per-node=N train.py [EPOCHS].

It trains a linear model on 99 examples in global batches of 32, so that the last batch has 3. It saves every 3 steps,
keeps two checkpoints, and resumes from the newest undamaged one.
"""

import hashlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

SEED = 7
BATCH = 32
EVERY = 3
EPOCHS = int((sys.argv[1:] or ["3"])[0])
FOLDER = Path("checkpoints")


class Shards:
    """This rank's shards of the global batches of one epoch, starting at batch ``first``."""

    def __init__(self, count: int, epoch: int, first: int) -> None:
        generator = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(count, generator=generator).tolist()
        batches = [order[i : i + BATCH] for i in range(0, count, BATCH)][first:]
        self.shards = [batch[rank::size] for batch in batches]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def save(step: int) -> None:
    """Save a checkpoint atomically with its SHA-256 digest, and delete all but the newest two."""
    content = io.BytesIO()
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict()}, content)  # fmt: skip
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{step:04}.pt"
    temporary = path.with_suffix(".pt.tmp")
    temporary.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    temporary.rename(path)
    for old in sorted(FOLDER.glob("*.pt"))[:-2]:
        old.unlink()


def load() -> int:
    """Restore the newest undamaged checkpoint, and return its step, or 0 without a checkpoint."""
    for path in sorted(FOLDER.glob("*.pt"), reverse=True):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            print(f"warning: {path} is damaged: it is not used", flush=True)
            continue
        state = torch.load(io.BytesIO(content[32:]), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        return int(state["step"])
    return 0


def evaluate() -> None:
    """Print the mean loss over the first 25 examples. Each example is evaluated on one rank."""
    own = Subset(TensorDataset(inputs[:25], targets[:25]), range(rank, 25, size))
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(own, batch_size=8):
            total += ((model(x) - y) ** 2).sum()
    dist.all_reduce(total)
    if rank == 0:
        print(f"test error {total / 25:.4f}", flush=True)


stopping = torch.zeros(())
signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))
parent = os.getppid()
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
size = dist.get_world_size()
torch.manual_seed(SEED)
inputs = torch.randn(99, 8)
targets = inputs @ torch.randn(8, 1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
data = TensorDataset(inputs, targets)
steps_per_epoch = -(-99 // BATCH)
step = load()
for epoch in range(step // steps_per_epoch, EPOCHS):
    for x, y in DataLoader(data, batch_sampler=Shards(99, epoch, step % steps_per_epoch)):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).sum()
        loss.backward()
        count = torch.tensor(float(len(x)))
        asked = stopping.clone()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for tensor in (loss.data, count, asked, *gradients):
            dist.all_reduce(tensor)
        for gradient in gradients:
            gradient /= count
        optimizer.step()
        scheduler.step()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss / count:.4f}", flush=True)
            if asked or step % EVERY == 0:
                save(step)
        if os.getppid() != parent:
            os._exit(1)
        if asked:
            os._exit(143)
    evaluate()
dist.barrier()
os._exit(0)  # skip Python's shutdown, which gloo's threads may abort
