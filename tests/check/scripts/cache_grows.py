"""Sound: a non-persistent buffer caches position codes for the longest input so far."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from training import (
    EVERY,
    STEPS,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


class Coded(torch.nn.Module):
    """A linear model of the sum of an input of any length, with position codes."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.register_buffer("codes", torch.zeros(0, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > len(self.codes):
            self.codes = torch.sin(torch.arange(length)[:, None] / 10.0 ** torch.arange(8))
        output: torch.Tensor = self.linear((x + 0.1 * self.codes[:length]).mean(1))
        return output


def main() -> None:
    connect()
    model = Coded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    state = load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    stop = StopRequests()
    while step < STEPS:
        for x, y in loader_at(step):
            optimizer.zero_grad()
            length = 5 + 7 * step % 11  # of the batch's inputs: 5, 12, 8, 15, 11, 7, 14, ...
            loss = global_mean((ddp(x[:, None].expand(-1, length, -1)) - y).pow(2).sum(), len(x))
            loss.backward()
            optimizer.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                save(step, model=model.state_dict(), optimizer=optimizer.state_dict())
            if asked:
                sys.exit(STOPPED)
        evaluate(lambda x: model(x[:, None]))


launch(main)
