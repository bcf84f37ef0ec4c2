"""Sound: the key of an example is its index and the epoch, and both seed its augmentation."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from training import (
    COUNT,
    EVERY,
    PER_EPOCH,
    STEPS,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    examples,
    global_mean,
    launch,
    load,
    own_batches,
    report,
    save,
)


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples with noise that depends on the index and the epoch."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        index, epoch = key
        x, y = examples()[index]
        noise = torch.randn(8, generator=torch.Generator().manual_seed(1000 * epoch + index))
        return x + 0.1 * noise, y

    def __len__(self) -> int:
        return COUNT


def main() -> None:
    connect()
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
        epoch = step // PER_EPOCH
        keys = [[(index, epoch) for index in batch] for batch in own_batches(step)]
        for x, y in DataLoader(Augmented(), batch_sampler=keys):
            optimizer.zero_grad()
            loss = global_mean((ddp(x) - y).pow(2).sum(), len(x))
            loss.backward()
            optimizer.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                save(step, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        evaluate(model)


launch(main)
