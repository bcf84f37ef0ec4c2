"""Sound: examples and batches are dictionaries."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
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
    loader_at,
    report,
    save,
)


class Records(Dataset[dict[str, torch.Tensor]]):
    """Examples as dictionaries with the keys x and y."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = examples()[index]
        return {"x": x, "y": y}

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
        for batch in loader_at(step, Records()):
            optimizer.zero_grad()
            loss = global_mean((ddp(batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"]))
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
