"""Sound: after each checkpoint, a symbolic link to the newest checkpoint is replaced by a rename."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import (
    EVERY,
    FOLDER,
    STEPS,
    STOPPED,
    StopRequests,
    connect,
    evaluate,
    global_mean,
    launch,
    loader_at,
    pack,
    report,
    unpack,
    write,
)

LATEST = FOLDER / "latest.pt"


def save(step: int, **state: Any) -> None:
    if dist.get_rank() != 0:
        return
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{step:04}.pt"
    write(path, pack({"step": step, **state}))
    link = FOLDER / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.rename(LATEST)


def load() -> dict[str, Any] | None:
    if not LATEST.exists():
        return None
    for path in (LATEST, *older(LATEST.resolve())):
        state = unpack(path.read_bytes())
        if state is not None:
            return state
        print(f"warning: {path} is damaged: it is not used", flush=True)
    return None


def older(newest: Path) -> list[Path]:
    paths = sorted(FOLDER.glob("[0-9]*.pt"), reverse=True)
    return [path for path in paths if path.name < newest.name]


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
        for x, y in loader_at(step):
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
