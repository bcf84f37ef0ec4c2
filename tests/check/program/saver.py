"""A sound script of one process without a framework. It records 8 steps, and saves after every second step."""

import json
import os
from pathlib import Path

from samestep_record import record_step

STEPS = 8
EVERY = 2
KEPT = 2


def saves() -> list[Path]:
    return sorted(Path().glob("checkpoint-*.json"))


def save(step: int) -> None:
    with open("new.tmp", "w") as file:
        file.write(json.dumps({"step": step}) + " " * 20_000)  # larger than the file's buffer
        file.flush()
        os.fsync(file.fileno())
    os.replace("new.tmp", f"checkpoint-{step}.json")
    for path in saves()[:-KEPT]:
        path.unlink()


def load() -> int:
    for path in reversed(saves()):
        try:
            return int(json.loads(path.read_text())["step"])
        except ValueError:
            print(f"warning: {path} is damaged", flush=True)
    return 0


step = load()
while step < STEPS:
    record_step([step], lr=0.1, loss=1 / (step + 1))
    step += 1
    with open("log.txt", "a") as log:
        log.write(f"loss {1 / step}\n")
    if step % EVERY == 0:
        save(step)
