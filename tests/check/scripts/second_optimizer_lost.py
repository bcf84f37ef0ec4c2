"""Unsound: a resume restores the first optimizer's state, but not the second optimizer's."""

import sys
from typing import Any

import torch
from torch.nn.functional import softplus
from training import (
    BATCH,
    EVERY,
    STEPS,
    STOPPED,
    StopRequests,
    average_gradients,
    connect,
    evaluate,
    global_mean,
    launch,
    load,
    loader_at,
    report,
    save,
)


def main() -> None:
    rank, size = connect()
    generator = torch.nn.Linear(4, 8)
    critic = torch.nn.Linear(8, 1)
    first = torch.optim.Adam(critic.parameters(), lr=0.01)
    second = torch.optim.Adam(generator.parameters(), lr=0.01)
    step = 0
    parts: dict[str, Any] = {"generator": generator, "critic": critic, "first": first, "second": second}
    state = load()
    if state:
        for name in ("generator", "critic", "first"):
            parts[name].load_state_dict(state[name])
        step = state["step"]
    stop = StopRequests()
    while step < STEPS:
        for x, _ in loader_at(step):
            noise = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
            fake = generator(noise[rank::size][: len(x)])
            first.zero_grad()
            loss = global_mean(softplus(-critic(x)).sum() + softplus(critic(fake.detach())).sum(), len(x))
            loss.backward()
            average_gradients(critic)
            first.step()
            second.zero_grad()
            global_mean(softplus(-critic(fake)).sum(), len(x)).backward()
            average_gradients(generator)
            second.step()
            step += 1
            report(step, loss)
            asked = stop.agreed()
            if asked or step % EVERY == 0:
                save(step, **{name: part.state_dict() for name, part in parts.items()})
            if asked:
                sys.exit(STOPPED)
        evaluate(critic)


launch(main)
