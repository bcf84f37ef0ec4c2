"""Measure the time that the recorder of `samestep check` adds to a training step.

    .venvs/mnist_ddp/bin/python benchmarks/record_cost.py [--rounds 5] [--quick]

Each round trains one rank with DDP in a process without the recorder, and then in a process with the recorder. The
model is the small network of docs/make_it_survive.md, in batches of 48 examples. Its step takes about a millisecond, so
the difference is visible. The table has the medians of the steps, and the range of the differences over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import at_least
from start_up import shown
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
INSIDE = ROOT / "check" / "samestep_check" / "inside"
BATCH = 48
WARM_UP = 100  # steps that are not timed


def train(steps: int) -> float:
    """Return the median duration of a step, in milliseconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    count = BATCH * (WARM_UP + steps)
    examples = TensorDataset(torch.randn(count, 20), torch.randint(0, 5, (count,)))
    layers = torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    times = [time.perf_counter()]
    for x, y in DataLoader(examples, BATCH, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter())
    dist.destroy_process_group()
    taken = [after - before for before, after in zip(times, times[1:])]
    return 1000 * statistics.median(taken[WARM_UP:])


def measure(steps: int, is_recorded: bool) -> float:
    """Return the result of `train` in a new process, with or without the recorder."""
    with tempfile.TemporaryDirectory() as folder:
        environ = dict(os.environ)
        if is_recorded:
            config: dict[str, Any] = {"work": folder, "source": folder, "records": folder, "checkpoint": "none"}
            config["allowed"] = [tempfile.gettempdir()]
            environ |= {"PYTHONPATH": str(INSIDE), "SAMESTEP_INSIDE": json.dumps(config)}
        command = [sys.executable, __file__, f"--steps={steps}", "--train"]
        return float(subprocess.check_output(command, env=environ, text=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="number of rounds (default: 5)")
    parser.add_argument(
        "--steps", type=at_least(1), default=1000, help="number of timed steps per process (default: 1000)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of 100 steps")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(train(args.steps))
        return
    rounds, steps = (1, 100) if args.quick else (args.rounds, args.steps)
    plain = []
    recorded = []
    for _ in range(rounds):
        plain.append(measure(steps, False))
        recorded.append(measure(steps, True))
    more = [after - before for before, after in zip(plain, recorded)]
    print("| step | median, in ms |\n|---|---|")
    print(f"| without the recorder | {statistics.median(plain):.2f} |")
    print(f"| with the recorder | {statistics.median(recorded):.2f} |")
    print(f"| difference | {shown(more)} |")


if __name__ == "__main__":
    main()
