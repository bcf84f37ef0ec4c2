"""Sound: a checkpoint has several files, and its manifest is written last."""

import json
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
    FOLDER.mkdir(exist_ok=True)
    for name, part in state.items():
        write(FOLDER / f"{step:04}-{name}.pt", pack({"part": part}))
    write(FOLDER / f"{step:04}.json", json.dumps([*state]).encode())
    for old in sorted(FOLDER.glob("*.json"))[:-2]:
        old.unlink()
        for path in FOLDER.glob(f"{old.stem}-*.pt"):
            path.unlink()


def load() -> dict[str, Any] | None:
    for manifest in sorted(FOLDER.glob("*.json"), reverse=True):
        state: dict[str, Any] = {"step": int(manifest.stem)}
        for name in json.loads(manifest.read_text()):
            part = unpack((FOLDER / f"{manifest.stem}-{name}.pt").read_bytes())
            if part:
                state[name] = part["part"]
        if len(state) == 3:
            return state
        print(f"warning: {manifest} is damaged: it is not used", flush=True)
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
