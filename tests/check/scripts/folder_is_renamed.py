"""Sound: a checkpoint is a folder of several files, which a rename completes."""

import shutil
import sys
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


def save(step: int, **state: Any) -> None:
    if dist.get_rank() != 0:
        return
    temporary = FOLDER / "new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, part in state.items():
        write(temporary / f"{name}.pt", pack({"part": part}))
    folder = FOLDER / f"step-{step:04}"
    shutil.rmtree(folder, ignore_errors=True)  # a damaged checkpoint of this step
    temporary.rename(folder)
    for old in sorted(FOLDER.glob("step-*"))[:-2]:
        shutil.rmtree(old)


def load() -> dict[str, Any] | None:
    for folder in sorted(FOLDER.glob("step-*"), reverse=True):
        state: dict[str, Any] = {"step": int(folder.name[5:])}
        for path in folder.iterdir():
            part = unpack(path.read_bytes())
            if part:
                state[path.stem] = part["part"]
        if len(state) == 3:
            return state
        print(f"warning: {folder} is damaged: it is not used", flush=True)
    return None


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
