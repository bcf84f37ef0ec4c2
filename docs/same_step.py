"""Draw docs/same_step.png: the losses of one training at 1, 2, 3 and 4 ranks, and of one that was killed twice.

bash scripts/run_mnist_ddp.sh 1 --max-steps 0                      # makes .venvs/mnist_ddp
.venvs/mnist_ddp/bin/python -m pip install matplotlib==3.11.2
.venvs/mnist_ddp/bin/python docs/same_step.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ["--dataset=mnist-5k", "--dtype=float64", "--epochs=10", "--log-every=1", "--checkpoint-every=10", "--quiet"]


def losses(run_dir: Path) -> list[float]:
    try:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line[-1] == "}"]
    except FileNotFoundError:
        return []
    return [line["loss"] for line in lines if "loss" in line]


def train(n: int, run_dir: Path, kill_at: tuple[int, ...] = ()) -> list[float]:
    """Train at n ranks; a rank is killed as soon as the run has come to each step of ``kill_at``."""
    script = subprocess.Popen(
        ["bash", str(ROOT / "scripts/run_mnist_ddp.sh"), str(n), f"--run-dir={run_dir}", *OPTIONS]
    )
    for step in kill_at:
        while len(losses(run_dir)) < step:
            time.sleep(0.01)
        os.kill(json.loads((run_dir / "log" / "alive-1").read_text())["pid"], signal.SIGKILL)
    if script.wait() != 0:
        raise SystemExit(f"the run at {n} ranks failed")
    return losses(run_dir)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        curves = {f"{n} rank{'s' if n > 1 else ''}": train(n, Path(folder, str(n))) for n in (1, 2, 3, 4)}
        curves["3 ranks, one killed at steps 90 and 210"] = train(3, Path(folder, "killed"), (90, 210))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), constrained_layout=True)
    reference = curves["1 rank"]
    for i, (name, curve) in enumerate(curves.items()):
        left.plot(range(1, len(curve) + 1), curve, label=name, color=f"C{i}", linewidth=8 - 1.6 * i)
        if i:
            difference = [max(abs(a - b) / a, 1e-17) for a, b in zip(reference, curve)]
            right.plot(range(1, len(curve) + 1), difference, color=f"C{i}", linewidth=1)
    left.set(xlabel="step", ylabel="loss of the global batch", title="net on mnist-5k, global batch 128, dropout 0.5")
    right.set(xlabel="step", yscale="log", ylim=(1e-17, 1e-9), title="relative difference from 1 rank (float64)")
    left.legend()
    figure.savefig(ROOT / "docs" / "same_step.png", dpi=110)


if __name__ == "__main__":
    main()
