"""Make the runs of docs/seeing.md, their report, its screenshot, and the frames of `samestep watch`.

    bash scripts/run_mnist_ddp.sh 1 --max-steps 0                # makes .venvs/mnist_ddp
    bash scripts/run_lenet_paddle.sh 1 --max-steps 0             # makes .venvs/lenet_paddle
    apt-get install -y --no-install-recommends chromium          # or set CHROMIUM=/path/to/chromium
    .venvs/mnist_ddp/bin/python docs/report_runs.py FOLDER
    python3 docs/report_runs.py FOLDER elastic                   # makes only mnist_elastic's frames

The runs train LeNet in PyTorch and in Paddle from the same weights, in float64. They differ in world size, kills, a
stop signal, and the learning rate. The program skips runs that FOLDER already contains.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--dataset=mnist-5k --dtype=float64 --optimizer=adam --lr=0.001 --global-batch-size=125 --epochs=3".split()
COMMON += ["--log-every=1", "--checkpoint-every=20", "--quiet"]
OF = {"torch": ["mnist_ddp", "--model=lenet", "--dropout=0"], "paddle": ["lenet_paddle"]}
OF["elastic"] = ["mnist_elastic", "--model=lenet", "--dropout=0"]
COLUMNS, LINES = 96, 26
WINDOW = "1280,1800"


def step_of(run_dir: Path) -> int:
    """Return the last step in a run's metrics.jsonl, or 0 if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line[-1] == "}"]
        return max((line.get("step", 0) for line in lines), default=0)
    return 0


def train(framework: str, n: int, run_dir: Path, *options: str, kill: Sequence[int] = (), stop: int = 0) -> None:
    """Train at ``n`` ranks, unless the run already exists.

    Args:
        framework: key of OF, such as "torch".
        n: number of ranks.
        run_dir: folder of the run.
        options: more options of the app.
        kill: steps at which rank 1 gets SIGKILL.
        stop: step at which the launch script gets SIGTERM, or 0 to train to the end.
    """
    if (run_dir / "metrics.jsonl").exists():
        return
    print(run_dir.name, flush=True)
    app, *app_options = OF[framework]
    command = ["bash", str(ROOT / "scripts" / f"run_{app}.sh"), str(n), f"--run-dir={run_dir}"]
    command += [*COMMON, *app_options, *options]
    script = subprocess.Popen(command)
    for step in kill:
        while step_of(run_dir) < step and script.poll() is None:
            time.sleep(0.02)
        os.kill(json.loads((run_dir / "log" / "alive-1").read_text())["pid"], signal.SIGKILL)
    while stop and step_of(run_dir) < stop and script.poll() is None:
        time.sleep(0.02)
    if stop:
        script.send_signal(signal.SIGTERM)
    if script.wait() != (128 + signal.SIGTERM if stop else 0):
        raise SystemExit(f"{run_dir} ended with {script.returncode}")


@contextlib.contextmanager
def watched(run_dir: Path, output: Path) -> Iterator[None]:
    """Run `samestep watch` in a pseudo-terminal during the ``with`` block, and write the distinct frames to a file.

    Args:
        run_dir: run directory that `samestep watch` shows.
        output: path of the file for the frames.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "core"), "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
        os.execve(sys.executable, [sys.executable, "-m", "samestep_observe.watch", str(run_dir)], environ)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the read fails when the program ends
            while content := os.read(terminal, 2**16):
                shown.append(content)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        reader.join(timeout=30)  # `samestep watch` exits at the end of the run
        if reader.is_alive():
            os.kill(pid, signal.SIGINT)
            reader.join()
        os.waitpid(pid, 0)
        os.close(terminal)
    screens = b"".join(shown).decode().partition("\x1b[?1049l")[0].split("\x1b[H")[1:]
    frames = [re.sub(r"\x1b\[[0-9?]*[A-Za-z]|\r", "", each).rstrip() for each in screens]
    frames = [each for i, each in enumerate(frames) if each not in frames[:i]]
    output.write_text(f"\n{'-' * COLUMNS}\n".join(frames) + "\n")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[2:] == ["elastic"]:
        (folder / "elastic" / "log").mkdir(parents=True)
        with watched(folder / "elastic", folder / "elastic-frames.txt"):
            train("elastic", 3, folder / "elastic", "--epochs=20", kill=(200,))
        return
    train("torch", 1, folder / "start", "--max-steps=0")
    same = f"--init-from={folder / 'start' / 'model.safetensors'}"
    runs = {name: folder / name for name in ("torch-1", "torch-4", "torch-4-killed-twice", "torch-2-stopped")}
    runs |= {name: folder / name for name in ("paddle-1", "paddle-4", "paddle-2-killed", "torch-1-lr-0.002")}
    train("torch", 1, runs["torch-1"], same)
    train("torch", 4, runs["torch-4"], same)
    train("torch", 4, runs["torch-4-killed-twice"], same, kill=(30, 70))
    train("torch", 2, runs["torch-2-stopped"], same, stop=50)
    train("paddle", 1, runs["paddle-1"], same)
    train("paddle", 4, runs["paddle-4"], same)
    train("paddle", 2, runs["paddle-2-killed"], same, kill=(50,))
    train("torch", 1, runs["torch-1-lr-0.002"], same, "--lr=0.002")
    if not (folder / "frames.txt").exists():
        (folder / "watched" / "log").mkdir(parents=True)
        with watched(folder / "watched", folder / "frames.txt"):
            train("torch", 2, folder / "watched", same, "--epochs=4", kill=(60,))
    page = folder / "report.html"
    command = [sys.executable, "-m", "samestep_observe.report", *map(str, runs.values()), "-o", str(page)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "core")}, check=True)
    chromium = [os.environ.get("CHROMIUM", "chromium"), "--headless", "--no-sandbox", "--hide-scrollbars"]
    chromium += [f"--window-size={WINDOW}", f"--user-data-dir={folder / 'profile'}"]
    subprocess.run([*chromium, f"--screenshot={folder / 'report.png'}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
