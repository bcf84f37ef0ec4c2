"""Sound: the keys of the examples are file names."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from training import (
    COUNT,
    EVERY,
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


class Files(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples, with file names as keys."""

    def __getitem__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = examples()[int(name.partition(".")[0])]
        return x, y

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
        names = [[f"{index:03}.txt" for index in batch] for batch in own_batches(step)]
        for x, y in DataLoader(Files(), batch_sampler=names):
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
