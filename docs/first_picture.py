"""Draw docs/first_picture.svg, which shows the losses of docs/usual_loop.py without and with the README's diff.

The program also draws docs/first_picture.zh.svg, the same picture for README.zh.md.

    .venvs/mnist_ddp/bin/python docs/first_picture.py FOLDER

Both loops train in float64 at 1, 2 and 4 ranks. Each loop also has a run with a kill: rank 1 of 4 is killed at step 70,
and the same command starts the job again. The program saves the output of each run in FOLDER, and skips the runs that
FOLDER already contains. All runs together need four minutes on 2 cores. If the losses with Samestep differ by more than
rounding errors, the picture shows NOT EQUAL.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
PROGRAM = ROOT / "docs" / "usual_loop.py"
PICTURE = ROOT / "docs" / "first_picture.svg"
# Regular expressions of the picture's texts, and their translations. `in_chinese` applies all of them in this order.
CHINESE = {
    "The losses of one training at 1, 2 and 4 ranks, and after a kill, by two programs": (
        "同一训练在 1、2、4 个 rank 上以及被杀之后的 loss，两个程序"
    ),
    "A usual DDP loop": "普通的 DDP 循环",
    "The same loop with Samestep": "同一个循环，改用 Samestep",
    "the mean loss of the last epoch differs by up to (.+)": r"最后一个 epoch 的平均 loss 最多相差 \1",
    "steps differ by at most (.+), also after a kill": r"每步最多相差 \1，被杀之后也一样",
    "0 samples": "0 个样本",
    "rank 1 killed, job repeated": "杀掉 rank 1，再次启动作业",
    "ranks, one killed: (.+) in the last epoch": r"个 rank，杀掉一个：最后一个 epoch 为 \1",
    "ranks?: (.+) in the last epoch": r"个 rank：最后一个 epoch 为 \1",
}
LOSS = re.compile(r"epoch (\d+) step (\d+) loss (\S+)")
STEPS_PER_EPOCH = 32
BATCH_SIZE = 128
KILL_AT = 70
EQUAL = 1e-12  # largest relative difference between losses that differ only by rounding
COUNTS = (1, 2, 4)
LIMIT = 600.0  # timeout of a run, in seconds

# The browser chooses between the light and the dark version of this style.
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
.title { font-weight: 600; font-size: 15px; fill: #24292f }
.grid { stroke: #d0d7de }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round }
.mark { stroke: #57606a; stroke-dasharray: 3 3 }
.c0 { stroke: #0969da } .c1 { stroke: #bc4c00 } .c2 { stroke: #8250df } .c3 { stroke: #1a7f37 }
.bad { fill: #cf222e; font-weight: 600 }
.good { fill: #1a7f37; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .title { fill: #f0f6fc }
  .grid { stroke: #3d444d }
  .mark { stroke: #9198a1 }
  .c0 { stroke: #58a6ff } .c1 { stroke: #e3892b } .c2 { stroke: #bc8cff } .c3 { stroke: #3fb950 }
  .bad { fill: #ff7b72 }
  .good { fill: #3fb950 }
}
"""
WIDTH, HEIGHT = 880, 356
LEFT, RIGHT, PANEL = 44, 484, 372
TOP, BOTTOM = 62, 250
HIGHEST_LOSS = 2.5
WINDOW = 8  # length of the moving average that smooths the curves, in steps

Losses = list[float]
Runs = dict[str, Losses]


def diff_of_the_page(page: str) -> list[str]:
    """Return the lines of the first ```diff block of a page."""
    found = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    if not found:
        raise SystemExit("error: README.md has no diff: write it between ```diff and ```")
    return found[1].splitlines()


def changed(program: str, diff: Sequence[str]) -> str:
    """Apply a diff without line numbers, and return the new program.

    Args:
        program: text of the program before the change.
        diff: lines that begin with a space, ``-`` or ``+``, in the order of the program. ``@@`` marks omitted lines.

    Raises:
        SystemExit: the diff shows two consecutive lines that are not consecutive in the program.
    """
    lines = program.splitlines()
    made: list[str] = []
    position = 0
    is_next = False  # whether the next line of the diff must directly follow the previous line in the program
    for line in diff:
        mark, text = line[:1] or " ", line[1:]
        if line.startswith("@@"):
            is_next = False
        elif mark == "+":
            made.append(text)
        else:
            found = lines.index(text, position)
            if is_next and found != position:
                raise SystemExit(f"error: {text!r} of the diff follows another line in the program: correct the diff")
            made += lines[position:found]
            if mark == " ":
                made.append(text)
            position = found + 1
            is_next = True
    return "\n".join([*made, *lines[position:]]) + "\n"


def train(program: Path, count: int, folder: Path, kill: bool = False) -> Losses:
    """Train on ``count`` ranks and return the loss of each step.

    Args:
        program: path of the training script.
        count: number of ranks.
        folder: folder for the output. If the folder contains a complete run, the function returns the run's losses.
        kill: whether to send SIGKILL to rank 1 at step KILL_AT, and to start the job again by the same command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    if not log.exists() or "epoch 4 accuracy" not in log.read_text():
        log.write_text("")
        if kill:
            start(program, count, folder, log, kill=True)
        code = start(program, count, folder, log)
        if code != 0:
            raise SystemExit(f"error: {program.name} at {count} ranks ended with code {code}: see {log}")
    return losses(log.read_text())


def start(program: Path, count: int, folder: Path, log: Path, kill: bool = False) -> int:
    """Run a job to its end, and return its exit code.

    Args:
        program: path of the training script.
        count: number of ranks.
        folder: folder of the run. The program writes to the subfolder ``out`` of this folder.
        log: file to which the output is appended.
        kill: whether to send SIGKILL to rank 1 at step KILL_AT.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [str(program), "--dtype", "float64", "--out", str(folder / "out")]
    paths = os.pathsep.join([str(ROOT / "core"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    print(folder.name, flush=True)
    job = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with log.open("a") as file:
        for line in job.stdout or ():
            file.write(line)
            found = LOSS.match(line)
            if kill and found and step_of(found) == KILL_AT:
                os.kill(children(job.pid)[1], signal.SIGKILL)
                kill = False
    return job.wait(timeout=LIMIT)


def children(pid: int) -> list[int]:
    """Return the PIDs of a process's children, in ascending order."""
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return sorted(int(word) for word in done.stdout.split())


def step_of(found: re.Match[str]) -> int:
    return int(found[1]) * STEPS_PER_EPOCH + int(found[2])


def losses(output: str) -> Losses:
    """Return the loss of each step. If a resumed run repeated a step, return the step's later loss."""
    by_step = {step_of(found): float(found[3]) for found in LOSS.finditer(output)}
    return [by_step[step] for step in sorted(by_step)]


def last_epoch(values: Sequence[float]) -> float:
    """Return the mean of the losses of the last epoch's steps."""
    return sum(values[-STEPS_PER_EPOCH:]) / STEPS_PER_EPOCH


def largest_difference(reference: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference between a reference value and the same step's value in ``others``."""
    differences: list[float] = []
    for other in others:
        differences += [abs(a - b) / a for a, b in zip(reference, other, strict=True)]
    return max(differences)


def measure(folder: Path) -> tuple[Runs, Runs]:
    """Return the losses of all runs of the usual loop, and of all runs of the loop with Samestep."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "with_samestep.py"
    program.write_text(changed(PROGRAM.read_text(), diff_of_the_page(PAGE.read_text())))
    results: list[Runs] = []
    for name, path in (("usual", PROGRAM), ("samestep", program)):
        runs = {str(count): train(path, count, folder / f"{name}-{count}") for count in COUNTS}
        runs["killed"] = train(path, COUNTS[-1], folder / f"{name}-killed", kill=True)
        results.append(runs)
    return results[0], results[1]


def smooth(values: Sequence[float]) -> Losses:
    windows = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def panel(x0: int, title: str, claim: str, style: str, runs: Mapping[str, Losses]) -> list[str]:
    """Return the SVG elements of one half of the picture.

    Args:
        x0: left edge, in pixels.
        title: text of the first line.
        claim: text of the second line, which shows the result.
        style: CSS class of the claim, "good" or "bad"; "good" dashes the curves.
        runs: losses by name of the run.
    """
    steps = len(runs["1"])

    def x(step: float) -> float:
        return x0 + PANEL * step / steps

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * min(loss, HIGHEST_LOSS) / HIGHEST_LOSS

    shown = [f'<text class="title" x="{x0}" y="24">{title}</text>']
    shown.append(f'<text class="{style}" x="{x0}" y="44">{claim}</text>')
    for value in (0, 1, 2):
        shown.append(f'<line class="grid" x1="{x0}" x2="{x0 + PANEL}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        shown.append(f'<text x="{x0 - 20}" y="{y(value) + 4:.1f}">{value}</text>')
    shown.append(f'<text x="{x0}" y="{BOTTOM + 18}">0 samples</text>')
    samples = f"{steps // STEPS_PER_EPOCH * 4000:,}"
    shown.append(f'<text x="{x0 + PANEL}" y="{BOTTOM + 18}" text-anchor="end">{samples}</text>')
    at = x(KILL_AT)
    shown.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{BOTTOM}"/>')
    shown.append(f'<text x="{at + 5:.1f}" y="{TOP + 14}">rank 1 killed, job repeated</text>')
    for number, (name, values) in enumerate(runs.items()):
        # The four curves are equal, so each curve draws a different quarter of every dash period.
        dash = f'stroke-dasharray="7 21" stroke-dashoffset="{-7 * number}"' if style == "good" else ""
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(smooth(values), 1))
        shown.append(f'<polyline class="curve c{number}" {dash} points="{points}"/>')
        row = BOTTOM + 40 + 18 * number
        shown.append(f'<line class="curve c{number}" x1="{x0}" x2="{x0 + 22}" y1="{row - 4}" y2="{row - 4}"/>')
        shown.append(f'<text x="{x0 + 30}" y="{row}">{words(name)}: {last_epoch(values):.12f} in the last epoch</text>')
    return shown


def words(name: str) -> str:
    if name == "killed":
        return f"{COUNTS[-1]} ranks, one killed"
    return "1 rank" if name == "1" else f"{name} ranks"


def draw(usual: Runs, same: Runs) -> str:
    """Return the picture as SVG."""
    difference = largest_difference([last_epoch(usual["1"])], [[last_epoch(run)] for run in usual.values()])
    bad = f"the mean loss of the last epoch differs by up to {difference:.0%}"
    rounding = largest_difference(same["1"], [*same.values()])
    is_equal = rounding < EQUAL and same["killed"] == same[str(COUNTS[-1])]
    good = f"steps differ by at most {rounding:.0e}, also after a kill"
    shown = panel(LEFT, "A usual DDP loop", bad, "bad", usual)
    shown += panel(RIGHT, "The same loop with Samestep", good if is_equal else "NOT EQUAL", "good", same)
    body = "\n".join(shown)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    about = "<title>The losses of one training at 1, 2 and 4 ranks, and after a kill, by two programs</title>"
    return f"{head}\n{about}\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def in_chinese(picture: str) -> str:
    """Return the picture with its texts in Chinese."""

    def translate(match: re.Match[str]) -> str:
        text = match[2]
        for pattern, replacement in CHINESE.items():
            text = re.sub(f"{pattern}$", replacement, text)
        return f"{match[1]}{text}<"

    return re.sub(r"(<(?:text|title)[^>]*>)([^<]*)<", translate, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description="draw docs/first_picture.svg from eight runs")
    parser.add_argument("folder", type=Path, help="folder for the output of the runs")
    picture = draw(*measure(parser.parse_args().folder.resolve()))
    PICTURE.write_text(picture)
    PICTURE.with_suffix(".zh.svg").write_text(in_chinese(picture))


if __name__ == "__main__":
    main()
