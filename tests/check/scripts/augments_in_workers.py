"""Sound: the loader's workers augment the examples, with a seed that depends on the epoch and the rank."""

import signal
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from training import (
    PER_EPOCH,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    examples,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)

STEPS = 4 * PER_EPOCH


class Augmented(Dataset[Any]):
    """The training examples with noise, as a random crop or flip is."""

    def __init__(self) -> None:
        self._data = examples()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self._data[index]
        return x + 0.3 * torch.randn(x.shape), y


def ignore_term(_: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> None:
    rank, size = connect()
    data = Augmented()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    stop = StopRequests()
    while step < STEPS:
        seed = torch.Generator().manual_seed(step // PER_EPOCH * size + rank)
        for x, y in loader_at(step, data, num_workers=2, worker_init_fn=ignore_term, generator=seed):
            optimizer.zero_grad()
            loss = global_mean((ddp(x) - y).pow(2).sum(), len(x))
            loss.backward()
            optimizer.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % PER_EPOCH == 0:
                save(step, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
