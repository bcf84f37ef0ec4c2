"""Draw docs/causes.svg, which shows how much each cause makes the losses at 1 and 2 ranks differ.

    .venvs/mnist_ddp/bin/python docs/causes.py FOLDER

The program saves the output of docs/causes_loop.py at 1 and 2 ranks in FOLDER. It skips a run if FOLDER already
contains the run's output. The two runs need one minute on 2 cores.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "docs" / "causes_loop.py"
PICTURE = ROOT / "docs" / "causes.svg"
LIMIT = 300.0  # timeout of a run, in seconds
# Label of each cause, and its colors for light and dark pages, in the order of the page. The keys are the names of the
# causes in PROGRAM.
CAUSES = {
    "batch": ("1 a batch per rank", "#cf222e", "#ff7b72"),
    "mean": ("2 mean of means", "#0969da", "#58a6ff"),
    "padding": ("3 padding", "#bc4c00", "#e3892b"),
    "order": ("4 order", "#8250df", "#bc8cff"),
    "random": ("5 random numbers", "#bf3989", "#f778ba"),
    "statistics": ("6 batch statistics", "#1b7c83", "#39c5cf"),
    "schedule": ("7 schedule", "#6e7781", "#9198a1"),
    "float32": ("8 rounding, float32", "#9a6700", "#d29922"),
    "none": ("none, float64", "#1a7f37", "#3fb950"),
}
WIDTH = 880
HEIGHT = 360
LEFT, RIGHT, TOP, BOTTOM = 60, 660, 20, 310
LOWEST = -17  # bottom of the vertical axis, as the exponent of a power of ten
HIGHEST = 0


def train(count: int, folder: Path) -> dict[str, list[float]]:
    """Train at ``count`` ranks, and return the loss of each step by cause."""
    log = folder / f"{count}.txt"
    if not log.exists():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        paths = os.pathsep.join([str(ROOT / "core"), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command.append(str(PROGRAM))
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode != 0:
            raise SystemExit(f"error: {PROGRAM.name} at {count} ranks ended: {done.stderr[-2000:]}")
        log.write_text(done.stdout)
    losses: dict[str, list[float]] = {}
    for cause, text in re.findall(r"^(\w+) loss (\S+)$", log.read_text(), re.MULTILINE):
        losses.setdefault(cause, []).append(float(text))
    return losses


def differences(folder: Path) -> dict[str, list[float]]:
    """Return log10 of the relative difference between the losses at 2 ranks and 1 rank, per step, by cause."""
    folder.mkdir(parents=True, exist_ok=True)
    alone, both = train(1, folder), train(2, folder)
    found: dict[str, list[float]] = {}
    for cause in CAUSES:
        relative = [abs(a - b) / a for a, b in zip(alone[cause], both[cause])]
        found[cause] = [math.log10(max(value, 10.0**LOWEST)) for value in relative]
    return found


def draw(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the picture as SVG."""
    steps = max(len(curve) for curve in curves.values())

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    def y(power: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (power - LOWEST) / (HIGHEST - LOWEST)

    shown: list[str] = []
    for power in range(LOWEST + 1, HIGHEST + 1, 4):
        shown.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(power):.1f}" y2="{y(power):.1f}"/>')
        shown.append(f'<text x="{LEFT - 8}" y="{y(power) + 4.5:.1f}" text-anchor="end">1e{power}</text>')
    for step in range(0, steps + 1, 16):
        label = "step 0" if step == 0 else str(step)
        shown.append(f'<text x="{x(step):.1f}" y="{BOTTOM + 19}" text-anchor="middle">{label}</text>')
    for number, (cause, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(power):.1f}" for step, power in enumerate(curve, 1))
        shown.append(f'<polyline class="curve {cause}" points="{points}"/>')
        row = TOP + 20 + 24 * number
        shown.append(f'<line class="curve {cause}" x1="{RIGHT + 20}" x2="{RIGHT + 42}" y1="{row - 4}" y2="{row - 4}"/>')
        shown.append(f'<text x="{RIGHT + 50}" y="{row}">{CAUSES[cause][0]}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    about = "<title>Relative difference of the loss at 2 ranks from the loss at 1 rank, by cause</title>"
    body = "\n".join(shown)
    return f"{head}\n{about}\n<style>{style()}</style>\n{body}\n</svg>\n"


def style() -> str:
    light = [f".{cause} {{ stroke: {colors[1]} }}" for cause, colors in CAUSES.items()]
    dark = [f".{cause} {{ stroke: {colors[2]} }}" for cause, colors in CAUSES.items()]
    return "\n".join(
        [
            'text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }',
            ".grid { stroke: #d0d7de }",
            ".curve { fill: none; stroke-width: 2; stroke-linejoin: round }",
            *light,
            "@media (prefers-color-scheme: dark) {",
            "text { fill: #9198a1 }",
            ".grid { stroke: #3d444d }",
            *dark,
            "}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="draw docs/causes.svg from two runs")
    parser.add_argument("folder", type=Path, help="folder for the output of the runs")
    PICTURE.write_text(draw(differences(parser.parse_args().folder.resolve())))


if __name__ == "__main__":
    main()
