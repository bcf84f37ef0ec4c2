"""Measure how long samestep.checkpoint.save delays a step, compared with torch.save and with writing the same bytes.

    python benchmarks/checkpoint.py [--rounds 15] [--dir FOLDER] [--quick] [--json FILE]

Three variants take turns in each round, on the same disk (--dir; by default a temporary folder under runs/):

- save: This variant does the work of mnist_ddp's rank 0 between two steps, except the gather of all ranks' checksums.
  It converts the model and the optimizer to arrays, computes a checksum of each array, and calls `checkpoint.save`,
  which copies the arrays. A thread then hashes, writes and syncs the files, renames the folder, and deletes the oldest
  of the three earlier checkpoints. In the app, training continues meanwhile. The column *whole* has the time until the
  thread has finished.

- plain: This variant writes and syncs the same number of files of the same sizes, without a rename or a checksum.

- torch.save: This variant writes and syncs one file of the same tensors.

The script times two models: mnist_ddp's model with SGD momentum, and a model of 200 MB without optimizer state. A ratio
divides the time of save by the time of another variant in the same round. Times and ratios are medians with quartiles.
Run the script with a Python that has apps/mnist_ddp's requirements. To compare two commits, alternate between the
scripts of their checkouts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_ddp")]
from arguments import at_least  # noqa: E402
from samestep import checkpoint  # noqa: E402
from samestep.torch import weights  # noqa: E402

app = importlib.import_module("model")  # mnist_ddp's model.py


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return mnist_ddp's model, and its optimizer with momentum after one update."""
    model: nn.Module = app.build_model("net", 0.0, torch.float32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 1, 28, 28)).sum().backward()
    optimizer.step()
    return model, optimizer


def large_model(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with ``layers`` layers of 8 MB, and an optimizer without state."""
    model = nn.Sequential(*(nn.Linear(1000, 2000, bias=False) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Ways:
    """Write a model to the disk in three ways.

    Attributes:
        place: the folder to which `plain` and `torch_save` write.
        contents: the bytes of each file of a checkpoint, which `plain` writes.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Save three times, so that each later save also deletes the oldest checkpoint."""
        self.model = model
        self.optimizer = optimizer
        self.run_dir = folder / "run"
        self.place = folder / "others"
        self.step = 0
        for _ in range(3):
            saved = self.save()
        checkpoint.finish()
        self.contents = [path.read_bytes() for path in sorted(saved.iterdir())]

    def save(self) -> Path:
        """Save with checksums, as mnist_ddp's rank 0 does. Return the checkpoint's folder."""
        groups = weights.groups(self.model, self.optimizer)
        self.step += 1
        state = {"seconds": time.monotonic()}
        arithmetic = {"seed": 1, "lr": 0.1}
        return checkpoint.save(
            self.run_dir, "benchmark", self.step, groups, state, arithmetic, keep=3, compare=lambda checksums: None
        )

    def plain(self) -> None:
        """Write the bytes of each file of a checkpoint to a file in ``place``, and sync it."""
        for number, content in enumerate(self.contents):
            with (self.place / str(number)).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    def torch_save(self) -> None:
        """Write the model and the optimizer to one file by `torch.save`, and sync it."""
        with (self.place / "all.pt").open("wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return each variant's milliseconds in each round, by name, and under "bytes" the size of each checkpoint file."""
    ways = Ways(model, optimizer, folder)
    contestants: dict[str, Callable[[], object]] = {
        "save": ways.save,
        "plain": ways.plain,
        "torch.save": ways.torch_save,
    }
    taken: dict[str, list[float]] = {name: [] for name in (*contestants, "whole")}
    for number in range(rounds):
        names = list(contestants)
        for name in names[number % 3 :] + names[: number % 3]:
            shutil.rmtree(ways.place, ignore_errors=True)
            ways.place.mkdir()
            os.sync()  # so that no variant waits for the writes of the previous variant
            begun = time.perf_counter()
            contestants[name]()
            taken[name].append(1000 * (time.perf_counter() - begun))
            if name == "save":
                checkpoint.finish()
                taken["whole"].append(1000 * (time.perf_counter() - begun))
    taken["bytes"] = [float(len(content)) for content in ways.contents]
    return taken


def shown(values: list[float], digits: int) -> str:
    """Return the median and the quartiles of ``values`` as text."""
    first, median, third = statistics.quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return f"{median:,.{digits}f} ({first:,.{digits}f} to {third:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=15, help="(default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="on the disk to be measured (default: under the repository's runs/)")
    parser.add_argument("--quick", action="store_true", help="one round, 16 MB in place of 200: that it still runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's milliseconds there, too")
    options = parser.parse_args()
    rounds, layers = (1, 2) if options.quick else (options.rounds, 25)
    machine = {
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
    print(f"{', '.join(f'{name} {value}' for name, value in machine.items())}, {rounds} rounds, ms\n")
    print("| model | bytes | save | whole | plain | ratio | torch.save | ratio |\n|---|---|---|---|---|---|---|---|")
    above = options.dir or ROOT / "runs"
    above.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, made in (("mnist_ddp, momentum", small_model()), (f"{8 * layers} MB", large_model(layers))):
        with tempfile.TemporaryDirectory(dir=above, prefix="benchmark-") as folder:
            taken = found[name] = measure(*made, rounds, Path(folder))
        cells = [name, f"{sum(taken['bytes']):,.0f} in {len(taken['bytes'])} files"]
        cells += [shown(taken["save"], 1), shown(taken["whole"], 1)]
        for other in ("plain", "torch.save"):
            ratios = [ours / theirs for ours, theirs in zip(taken["save"], taken[other])]
            cells += [shown(taken[other], 1), shown(ratios, 2)]
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
