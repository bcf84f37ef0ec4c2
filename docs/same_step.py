"""Draw docs/same_step.svg, with the losses of one training at 1, 2, 3 and 4 ranks, and of a run with two kills.

The command is ``python3.11 docs/same_step.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ["--dataset=mnist-5k", "--dtype=float64", "--epochs=10", "--log-every=1", "--checkpoint-every=10", "--quiet"]
KILLED = "3 ranks, killed at steps 90 and 210"

# The browser chooses between the light and the dark version of this style.
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
.title { font-weight: 600; fill: #24292f }
.grid { stroke: #d0d7de; stroke-width: 1 }
.curve { fill: none; stroke-width: 2.5; stroke-linejoin: round }
.c0 { stroke: #0969da } .c1 { stroke: #bc4c00 } .c2 { stroke: #1a7f37 }
.c3 { stroke: #8250df } .c4 { stroke: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .title { fill: #f0f6fc }
  .grid { stroke: #3d444d }
  .c0 { stroke: #58a6ff } .c1 { stroke: #e3892b } .c2 { stroke: #3fb950 }
  .c3 { stroke: #bc8cff } .c4 { stroke: #ff7b72 }
}
"""
WIDTH, HEIGHT = 880, 320
TOP = 36  # upper edge of both plots, in pixels
BOTTOM = 270  # lower edge
DASH = 7  # length of a dash, in pixels


def losses(run_dir: Path) -> list[float]:
    try:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line[-1] == "}"]
    except FileNotFoundError:
        return []
    return [line["loss"] for line in lines if "loss" in line]


def train(n: int, run_dir: Path, kill_at: tuple[int, ...] = ()) -> list[float]:
    """Train at ``n`` ranks, kill rank 1 at each step of ``kill_at``, and return the loss of each step."""
    script = subprocess.Popen(
        ["bash", str(ROOT / "scripts/run_mnist_ddp.sh"), str(n), f"--run-dir={run_dir}", *OPTIONS]
    )
    for step in kill_at:
        while len(losses(run_dir)) < step:
            time.sleep(0.01)
        os.kill(json.loads((run_dir / "log" / "alive-1").read_text())["pid"], signal.SIGKILL)
    if script.wait() != 0:
        raise SystemExit(f"error: the run at {n} ranks failed: see its message above")
    return losses(run_dir)


def measure() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        curves = {f"{n} rank{'s' if n > 1 else ''}": train(n, Path(folder, str(n))) for n in (1, 2, 3, 4)}
        curves[KILLED] = train(3, Path(folder, "killed"), (90, 210))
    return curves


def plot(
    left: int, title: str, curves: Mapping[int, Sequence[float]], ticks: Mapping[float, str], dashes: Mapping[int, str]
) -> list[str]:
    """Return the SVG elements of one plot.

    Args:
        left: left edge, in pixels.
        title: text above the plot.
        curves: value at each step of each curve, by the number of the curve's color.
        ticks: labels of the vertical axis, by value.
        dashes: dash attributes of each curve, by the number of the curve's color.
    """
    right, low, high = left + 360, min(ticks), max(ticks)
    steps = max(map(len, curves.values()))

    def x(step: float) -> float:
        return left + (right - left) * step / steps

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    shown = [f'<text class="title" x="{left}" y="18">{title}</text>']
    for value, label in ticks.items():
        shown.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        shown.append(f'<text x="{left - 8}" y="{y(value) + 4.5:.1f}" text-anchor="end">{label}</text>')
    for step in range(0, steps + 1, 80):
        label = f"step {step}" if step == 0 else str(step)
        shown.append(f'<text x="{x(step):.1f}" y="{BOTTOM + 19}" text-anchor="middle">{label}</text>')
    for i, curve in curves.items():
        points = " ".join(f"{x(step):.1f},{y(max(value, low)):.1f}" for step, value in enumerate(curve, 1))
        shown.append(f'<polyline class="curve c{i}" {dashes.get(i, "")} points="{points}"/>')
    return shown


def largest_so_far(reference: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return log10 of the largest relative difference up to each step, or -17 if all losses until then are equal."""
    differences = (math.log10(max(abs(a - b) / a, 1e-17)) for a, b in zip(reference, other))
    return [*itertools.accumulate(differences, max)]


def draw(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the picture as SVG. The right plot compares all other curves with the first curve."""
    reference, *others = curves.values()
    differences = {i: largest_so_far(reference, other) for i, other in enumerate(others, 1)}
    loss_ticks = {value / 2: f"{value / 2:.1f}" for value in range(0, 6)}
    ticks = {float(power): f"1e{power}" for power in range(-17, -8, 2)}
    # The curves are almost equal. So in the left plot, each curve draws a different fifth of every dash period. In the
    # right plot, the last curve is dashed.
    fifths = {i: f'stroke-dasharray="{DASH} {DASH * 4}" stroke-dashoffset="{-DASH * i}"' for i in range(len(curves))}
    dashed = {len(others): f'stroke-dasharray="{DASH}"'}
    shown = plot(
        48, "Loss of the global batch: five runs, one curve", dict(enumerate(curves.values())), loss_ticks, fifths
    )
    shown += plot(500, "Largest relative difference from 1 rank (float64)", differences, ticks, dashed)
    at = 48
    for i, name in enumerate(curves):
        shown.append(f'<line class="c{i}" stroke-width="3" x1="{at}" x2="{at + 18}" y1="308" y2="308"/>')
        shown.append(f'<text x="{at + 24}" y="312.5">{name}</text>')
        at += 110
    body = "\n".join(shown)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    about = "<title>The losses of one training at 1, 2, 3 and 4 ranks, and of one that was killed twice</title>"
    return f"{head}\n{about}\n<style>{STYLE}</style>\n{body}\n</svg>\n"


if __name__ == "__main__":
    (ROOT / "docs" / "same_step.svg").write_text(draw(measure()))
