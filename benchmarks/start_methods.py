"""Measure the seconds and the memory of a short run, from its start by fork, exec or bare torchrun to its end.

    python benchmarks/start_methods.py [--app mnist_ddp] [--ranks 1 2 4] [--rounds 5] [--steps 30] [--json FILE]
    python benchmarks/start_methods.py --app cifar_ddp --ranks 2 -- --global-batch-size 8      # options of the app

Each round starts the same program in three ways: its launch script with --start-method fork, the script with
--start-method exec, and `torchrun --standalone`. An uncounted first round measures memory: the largest sum of the
proportional set size (PSS) of the job's processes, in MiB. All runs use this Python, which needs the app's packages.
All runs must end with equal weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("fork", "exec", "torchrun")
OPTIONS = {
    "mnist_ddp": ["--dataset=mnist-5k"],
    "cifar_ddp": ["--dataset=synthetic-cifar10"],
    "gpt_fsdp": [],
    "mnist_lightning": ["--dataset=mnist-5k"],
}


def command(app: str, way: str, ranks: int, options: list[str]) -> list[str]:
    if way == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [*torchrun, str(ROOT / "apps" / app / "train.py"), *options]
    script = str(ROOT / "scripts" / f"run_{app}.sh")
    return ["bash", script, str(ranks), *options, f"--start-method={way}"]


def descendants(pid: int) -> list[int]:
    children_file = Path(f"/proc/{pid}/task/{pid}/children")
    found = [pid]
    try:
        children = children_file.read_text().split()
    except OSError:
        return found
    for child in children:
        found += descendants(int(child))
    return found


def pss(pid: int) -> int:
    """Return a process's proportional set size in KiB, or 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return sum(sizes)


def watch_memory(job: subprocess.Popen[bytes], peaks: list[int]) -> None:
    while job.poll() is None:
        peaks.append(sum(pss(pid) for pid in descendants(job.pid)))
        time.sleep(0.1)


def run(app: str, way: str, ranks: int, words: list[str], folder: Path, peaks: list[int] | None) -> tuple[float, str]:
    """Return a run's seconds and its weights_sha256.

    Args:
        app: name of the app, a key of OPTIONS.
        way: how the run starts, one of WAYS.
        ranks: number of ranks.
        words: options of the app.
        folder: folder for the run directory and the log.
        peaks: list for the PSS of all processes together, in KiB, measured every 0.1 s; None to measure no memory.
    """
    run_dir = folder / way
    options = [*OPTIONS[app], *words, f"--run-dir={run_dir}", "--device=cpu"]
    log = folder / f"{way}.log"
    environ = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        begun = time.perf_counter()
        job = subprocess.Popen(
            command(app, way, ranks, options),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        if peaks is not None:
            watcher = threading.Thread(target=watch_memory, args=(job, peaks))
            watcher.start()
        code = job.wait(timeout=600)
        seconds = time.perf_counter() - begun
    result = run_dir / "result.json"
    if code != 0 or not result.exists():
        sys.exit(f"error: {app} by {way} with {ranks} ranks ended with {code}: {log.read_text()[-2000:]}")
    return seconds, json.loads(result.read_text())["weights_sha256"]


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(app: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, int] = {}
    for number in range(options.rounds + 1):
        hashes = set()
        for way in WAYS:
            peaks: list[int] | None = [] if number == 0 else None
            with tempfile.TemporaryDirectory() as name:
                words = [f"--max-steps={options.steps}", *options.words]
                taken, weights = run(app, way, ranks, words, Path(name), peaks)
            hashes.add(weights)
            if peaks is None:
                seconds[way].append(taken)
            else:
                memory[way] = max(peaks) // 1024
        if len(hashes) != 1:
            sys.exit(f"error: the weights of {app} with {ranks} ranks differ by the way they start: {hashes}")
    return {"app": app, "ranks": ranks, "seconds": seconds, "MiB": memory, "weights": hashes.pop()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", choices=sorted(OPTIONS), default="mnist_ddp", help="(default: %(default)s)")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=30, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's seconds there, too")
    parser.add_argument("words", nargs="*", metavar="OPTION", help="options of the app, after --")
    options = parser.parse_args()
    rows = []
    print("| app | ranks | fork | exec | torchrun | fork / exec | fork / torchrun | MiB: fork, exec, torchrun |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for ranks in options.ranks:
        row = measure(options.app, ranks, options)
        rows.append(row)
        seconds = row["seconds"]
        ratios = []
        for other in ("exec", "torchrun"):
            ratios.append([ours / theirs for ours, theirs in zip(seconds["fork"], seconds[other])])
        cells = [shown(values) for values in (*seconds.values(), *ratios)]
        sizes = ", ".join(str(size) for size in row["MiB"].values())
        print(f"| {options.app} | {ranks} | {' | '.join(cells)} | {sizes} |", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
