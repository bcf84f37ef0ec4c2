"""Train a small model with the kit, without an app and without a `Run`. The row "kit" runs this program.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python kit_loop.py \\
        cuda FOLDER STEPS [KILLED_AT]

The training has batch norm, dropout, random flips, and a learning rate that changes with the step. Rank 0 prints the
losses in float64 and the SHA-256 of the weights. The last rank kills itself after KILLED_AT updates. The same command
without KILLED_AT then resumes from FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep import env
from samestep.options import SHARED_GPU
from samestep.torch import Checkpoints, DataLoader, GlobalBatchSampler, distributed, exact, global_mean
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

EXAMPLES = 200
BATCH = 37  # not a multiple of 2 or 3; the last batch of an epoch is smaller
TIMEOUT = 30.0  # seconds


class Images(Dataset[tuple[Tensor, int]]):
    """Random images [3, 8, 8], flipped at random, with the sign of their mean as the label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(EXAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = self.images[number]
        label = int(image.mean() > 0)
        if random.random() < 0.5:  # noqa: S311 - the kit seeds this generator by the example
            image = image.flip(2)
        return image, label


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of the names and values of the model's parameters and buffers, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    kind, folder, steps, *killed_at = sys.argv[1:]
    world = env.detect()
    device = distributed.choose_device(SHARED_GPU if kind == "cuda" else "cpu", world)
    distributed.rendezvous(world, device, TIMEOUT)
    torch.manual_seed(0)

    dataset = Images()
    sampler = GlobalBatchSampler(len(dataset), BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(288, 2),
    )
    model = exact(DistributedDataParallel(net.double().to(device)), sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=int(steps))
    checkpoints = Checkpoints(
        folder, every=4, model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, grace=None
    )
    checkpoints.restore()  # collective

    losses = []
    while sampler.step < int(steps):
        for images, labels in loader:
            optimizer.zero_grad()
            scores = model(images.to(device))
            loss_sum = F.cross_entropy(scores, labels.to(device), reduction="sum")
            loss = global_mean(loss_sum, len(labels))  # collective
            loss.backward()  # collective
            optimizer.step()
            schedule.step()
            checkpoints.step()
            losses.append(loss.item())
            if killed_at and sampler.step == int(killed_at[0]) and world.rank == world.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if sampler.step == int(steps):
                break
    if world.rank == 0:
        result = {"losses": losses, "weights": weights_digest(net), "backend": dist.get_backend()}
        print(json.dumps(result), flush=True)
    dist.barrier()  # collective
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
