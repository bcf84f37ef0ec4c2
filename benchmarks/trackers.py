"""Measure how much time --track adds to a step of mnist_ddp, if MLflow's server stops halfway through the run.

    python benchmarks/trackers.py [--rounds 5] [--ranks 2] [--steps 600] [--quick] [--json FILE]

The launch script uses this Python, which needs mlflow (not mlflow-skinny). Each step writes a line of metrics.jsonl,
and every 50th step writes a checkpoint. Usual runs write less. The milliseconds per step are the seconds in a run's
result, divided by the number of steps. Runs without and with --track take turns, and a ratio compares the two
runs of a round. The server has the lowest CPU priority, because it simulates a server on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900.0  # timeout of a run, and of the server's start, in seconds


def free_port() -> int:
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = ["nice", "-n19", sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}"]
    command += ["--workers=1", f"--backend-store-uri=sqlite:///{folder / 'server.db'}"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    deadline = time.monotonic() + LIMIT
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"error: MLflow's server did not start: {(folder / 'server.log').read_text()[-2000:]}")
        time.sleep(0.2)


def train(folder: Path, ranks: int, steps: int, *options: str, halfway: Callable[[], object] = lambda: None) -> float:
    """Train once, and return the milliseconds per step. Call ``halfway`` after half of the steps.

    Args:
        folder: folder for the run directory and the log.
        ranks: number of ranks.
        steps: number of training steps.
        options: further options of the app, such as ``--track=mlflow``.
        halfway: function to call after half of the steps.
    """
    run_dir = folder / "run"
    command = ["bash", str(ROOT / "scripts" / "run_mnist_ddp.sh"), str(ranks), f"--run-dir={run_dir}", "--quiet"]
    command += ["--dataset=mnist-5k", "--epochs=1000", "--log-every=1", "--checkpoint-every=50", f"--max-steps={steps}"]
    environ = {**os.environ, "PYTHON": sys.executable, "SAMESTEP_TRACK_SECONDS": "1"}
    with (folder / "run.log").open("wb") as log:
        job = subprocess.Popen([*command, *options], cwd=folder, env=environ, stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT
        called = False
        metrics = run_dir / "metrics.jsonl"
        while job.poll() is None:
            if time.monotonic() > deadline:
                job.terminate()
            if not called and metrics.exists() and len(metrics.read_bytes().splitlines()) > steps // 2:
                halfway()
                called = True
            time.sleep(0.1)
    if job.returncode != 0 or not called:
        sys.exit(f"error: {' '.join(command)} ended with {job.returncode}: {(folder / 'run.log').read_text()[-2000:]}")
    return float(json.loads((run_dir / "result.json").read_text())["seconds"]) / steps * 1000


def train_tracked(folder: Path, ranks: int, steps: int) -> float:
    """Train once with --track, stop the server after half of the steps, and return the milliseconds per step."""
    port = free_port()
    server = start_server(folder, port)
    os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
    try:
        return train(folder, ranks, steps, "--track=mlflow", halfway=server.terminate)
    finally:
        del os.environ["MLFLOW_TRACKING_URI"]
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="number of rounds (default: %(default)s)")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=600, help="steps of each run (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of 40 steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements there")
    options = parser.parse_args()
    rounds, steps = (1, 40) if options.quick else (options.rounds, options.steps)
    ms_per_step: dict[str, list[float]] = {"without": [], "with --track mlflow": []}
    for _ in range(rounds):
        for name, run in (("without", train), ("with --track mlflow", train_tracked)):
            with tempfile.TemporaryDirectory() as folder:
                ms_per_step[name].append(run(Path(folder), options.ranks, steps))
    ratios = [tracked / plain for plain, tracked in zip(*ms_per_step.values())]
    print(f"{os.cpu_count()} processors, {options.ranks} ranks, {rounds} rounds of {steps} steps; median (range)\n")
    print("| | ms per step |\n|---|---|")
    for name, values in {**ms_per_step, "ratio of the two of a round": ratios}.items():
        print(f"| {name} | {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) |")
    if options.json:
        results = {"ms": ms_per_step, "ratios": ratios, "ranks": options.ranks, "steps": steps}
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
