"""Measure the seconds until 0.90 accuracy on Fashion-MNIST's test set, for cifar_ddp and for a tutorial's loop.

    python3.11 benchmarks/time_to_accuracy.py              # N = 1 and 2, twice: about 20 minutes on 2 cores
    python3.11 benchmarks/time_to_accuracy.py --augment    # both loops crop and flip images

    python3.11 benchmarks/time_to_accuracy.py --shares     # what each setting contributes
    python3.11 benchmarks/time_to_accuracy.py --inputs     # compare --input memory with --input loader

- *app*: cifar_ddp as its launch script starts it, with the options RECIPE, timed by its own metrics.jsonl.

- *textbook*: the same layers in the same order, and batches of the same size (loops/time_to_accuracy.py). The loop has
  torchvision's dataset with per-sample transforms, a DataLoader with --workers, DistributedSampler, BatchNorm2d, and
  Adam at 1e-3 without a schedule. It computes in float32 with contiguous tensors.

The two loops take turns, with the same threads per rank. Both loops evaluate on the full test set every 100 steps, and
at each epoch's end. Seconds are wall-clock time from the first step to the end of the first evaluation that reached the
target. They include all earlier evaluations, but exclude start-up. The script stops the textbook loop after --cap times
the app's seconds, and then reports "> x".

Fashion-MNIST comes from Debian's package dataset-fashion-mnist, or from --data-dir/fashion-mnist. The script uses the
Python of .venvs/cifar_ddp, or PYTHON=/path/to/python.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arguments import at_least, counts

ROOT = Path(__file__).resolve().parents[1]
BATCH = 128
LIMIT = 1800  # timeout of each run, in seconds
# The recipe of docs/cifar_ddp_speed.md that reaches 0.90 soonest.
RECIPE = ["--schedule=linear", "--warmup-steps=20", "--lr=0.1", "--ema=0.98", "--dropout=0", "--label-smoothing=0"]
RECIPE += [f"--global-batch-size={BATCH}"]
PLAIN = ["--no-augment", "--epochs=1"]
AUGMENTED = ["--augment", "--epochs=2"]
# Each setting, and the options that turn it off. loops/time_to_accuracy.py defines the names without options.
# Variants in SAME differ from the recipe only by rounding errors, so these variants reach the target at the same step.
SHARES = {
    "the recipe": [],
    "contiguous": [],
    "pool last": [],
    "torch's norm": [],
    "loader, 2 workers": ["--input=loader", "--workers=2"],
    "bfloat16": ["--autocast=bfloat16"],
    "no average": ["--ema=0"],
    "constant rate": ["--schedule=constant", "--lr=0.05"],
    "constant rate, no average": ["--schedule=constant", "--lr=0.05", "--ema=0"],
    "AdamW, constant 1e-3, no average": ["--optimizer=adamw", "--schedule=constant", "--lr=0.001", "--ema=0"],
    "one-cycle": ["--schedule=one-cycle", "--warmup-steps=0"],
    "batch of 64": ["--global-batch-size=64", "--lr=0.05"],
    "batch of 512": ["--global-batch-size=512", "--lr=0.2"],
    "crops and flips, 2 epochs": AUGMENTED,
    "label smoothing and dropout 0.1": ["--label-smoothing=0.1", "--dropout=0.1"],
}
SAME = ("contiguous", "torch's norm", "loader, 2 workers")


def environment() -> str:
    """Return the path of the app's Python. Exit with an error if the file is missing."""
    python = os.environ.get("PYTHON") or str(ROOT / ".venvs" / "cifar_ddp" / "bin" / "python")
    if not Path(python).exists():
        sys.exit(f"error: no {python}: run `bash scripts/run_cifar_ddp.sh 1 --epochs=1` once, or set PYTHON")
    return python


def unpack(data_dir: Path, folder: Path, python: str) -> None:
    """Write Fashion-MNIST uncompressed into FashionMNIST/raw, in which torchvision and the app look for it."""
    code = (
        "import sys; from pathlib import Path; from samestep import ConfigError; from samestep.data import datasets\n"
    )
    code += "try: print(datasets.resolve('fashion-mnist', Path(sys.argv[1])).folder)\n"
    code += "except ConfigError as problem: sys.exit(f'error: {problem}')\n"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "core")}
    command = [python, "-c", code, str(data_dir.resolve())]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if found.returncode:
        sys.exit(found.stderr.strip())
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in Path(found.stdout.strip()).glob("*-ubyte*"):
        content = path.read_bytes()
        plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        (raw / path.name.removesuffix(".gz")).write_bytes(plain)


def run(command: list[str], folder: Path, n: int, python: str) -> None:
    """Run one job, and return after all its processes have ended."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // n)),  # the default of the launch script
        "PYTHON": python,
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("core", "benchmarks/loops")),
    }
    with (folder / "output").open("wb+") as output:
        job = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = job.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            sys.exit(f"error: {' '.join(command)} took over {LIMIT} s: give it a lower --cap or a quieter machine")
        finally:
            end(job)
        if code:
            output.seek(0)
            sys.exit(f"error: {' '.join(command)} ended with {code}: {output.read().decode(errors='replace')[-3000:]}")


def end(job: subprocess.Popen[bytes]) -> None:
    """Stop the launcher by TERM, so that the launcher stops its ranks, which are in other sessions."""
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


class Bench:
    """Start runs with shared settings. Each run gets its own folder."""

    def __init__(self, options: argparse.Namespace, data: Path, python: str) -> None:
        self.options = options
        self.data = data
        self.python = python

    def lines(self, n: int, *words: str) -> list[dict[str, Any]]:
        """Run the app, and return the lines of metrics.jsonl that have a step, with ``seconds`` since step 1 began."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            script = ["bash", str(ROOT / "scripts" / "run_cifar_ddp.sh"), str(n), "--dataset=fashion-mnist"]
            script += [f"--data-dir={self.data}", f"--run-dir={folder / 'run'}", "--device=cpu", "--checkpoint-every=0"]
            run([*script, *words], folder, n, self.python)
            text = (folder / "run" / "metrics.jsonl").read_text()
        lines = [line for line in map(json.loads, text.splitlines()) if "step" in line]
        seconds = 0.0
        seen = 0
        for line in lines:  # samples_per_second covers all time since the previous line
            seconds += (line["samples_seen"] - seen) / line["samples_per_second"]
            seen = line["samples_seen"]
            line["seconds"] = seconds
        return lines

    def app(self, n: int, seed: int) -> dict[str, float]:
        """Run the app, and return its first evaluation that reached the target, or its last evaluation."""
        words = [*RECIPE, *(AUGMENTED if self.options.augment else PLAIN), f"--seed={seed}"]
        words += [f"--evaluate-every={self.options.evaluate_every}"]
        if self.options.quick:
            words += ["--max-steps=4"]
        return self.reached(
            [
                {"step": line["step"], "accuracy": line["test_accuracy"], "seconds": line["seconds"]}
                for line in self.lines(n, *words)
                if "test_accuracy" in line
            ]
        )

    def textbook(self, n: int, seed: int, most: float) -> dict[str, float]:
        words = ["textbook", f"--seed={seed}", f"--workers={self.options.workers}", f"--max-seconds={most}"]
        return self.reached(self.loop(n, *words, *(["--augment"] if self.options.augment else [])))

    def loop(self, n: int, *words: str) -> Any:
        """Run loops/time_to_accuracy.py, and return its results."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            out = Path(name) / "found.json"
            command = [self.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            command += [str(ROOT / "benchmarks" / "loops" / "time_to_accuracy.py"), *words, f"--data={self.data}"]
            command += [f"--batch={BATCH}", f"--evaluate-every={self.options.evaluate_every}", f"--out={out}"]
            command += [f"--target={self.options.target}", f"--max-steps={4 if self.options.quick else 10**6}"]
            run(command, folder, n, self.python)
            return json.loads(out.read_text())

    def reached(self, found: list[dict[str, float]]) -> dict[str, float]:
        """Return the first evaluation that reached the target, or the last evaluation."""
        return next(filter(self.is_reached, found), found[-1])

    def is_reached(self, found: dict[str, float]) -> bool:
        return bool(found["accuracy"] >= self.options.target - 1e-6)  # the loops' accuracy is a float32

    def told(self, found: dict[str, float]) -> str:
        """Return an evaluation's seconds, steps and accuracy as text, with ">" if it did not reach the target."""
        bound = "" if self.is_reached(found) else "> "
        return f"{bound}{found['seconds']:.1f} s, {bound}{found['step']:.0f} steps, {found['accuracy']:.4f}"


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def compare(bench: Bench) -> None:
    """Run the app and the baseline loop in turns, and print a table."""
    print("| ranks | run | app | textbook | app / textbook | load |\n|---|---|---|---|---|---|")
    for n in bench.options.ranks:
        ratios = []
        ours = []
        theirs = []
        bound = ""
        for repeat in range(bench.options.repeats):
            app = bench.app(n, repeat + 1)
            textbook = bench.textbook(n, repeat + 1, app["seconds"] * bench.options.cap)
            ours.append(app["seconds"])
            theirs.append(textbook["seconds"])
            ratios.append(app["seconds"] / textbook["seconds"])
            mark = "" if bench.is_reached(textbook) else "< "
            bound = bound or mark
            cells = [str(n), str(repeat + 1), bench.told(app), bench.told(textbook), f"{mark}{ratios[-1]:.2f}", load()]
            print(f"| {' | '.join(cells)} |", flush=True)
        middle = [f"{statistics.median(values):.1f} s" for values in (ours, theirs)]
        print(f"| {n} | median | {middle[0]} | {middle[1]} | {bound}{statistics.median(ratios):.2f} | |", flush=True)


def shares(bench: Bench) -> None:
    """Turn off each setting alone, at one rank, and print the time of a step and the time until the target."""
    variants = {name: [*RECIPE, *PLAIN, *words] for name, words in SHARES.items()}
    together = {
        name: words for name, words in variants.items() if "loader" not in name
    }  # a loader's workers would load during other variants' steps
    rounds = 1 if bench.options.quick else 12
    timed = ["steps", f"--variants={json.dumps(together)}", f"--rounds={rounds}", "--max-seconds=0"]
    times = bench.loop(1, *timed)
    for name in set(variants) - set(together):
        times[name] = bench.loop(1, "steps", f"--variants={json.dumps({name: variants[name]})}", *timed[2:])[name]
    print(
        "| taken away | ms for 128 samples | recipe's / its | steps to the target | seconds | its / recipe's | load |\n"
        "|---|---|---|---|---|---|---|"
    )
    recipe: dict[str, float] = {}
    for name, words in variants.items():
        size = next(int(word.split("=")[1]) for word in reversed(words) if "batch-size" in word)
        each = [time * BATCH / size for time in times[name]]
        ratio = statistics.median(base / time for base, time in zip(times["the recipe"], each))
        cells = [name, f"{statistics.median(each):.1f}", f"{ratio:.2f}"]
        if name in SAME:
            cells += ["the same", "", f"{1 / ratio:.2f}, as a step"]
        else:
            most = recipe["seconds"] * bench.options.cap if recipe else LIMIT
            # A constant learning rate has no horizon, so this variant may train until the cap.
            more = ["--epochs=9"] if "--schedule=constant" in words else []
            variant = json.dumps({name: [*words, *more]})
            found = bench.reached(bench.loop(1, "app", f"--variants={variant}", f"--max-seconds={most}")[name])
            recipe = recipe or found
            bound = "" if bench.is_reached(found) else "> "
            cells += [f"{bound}{found['step']} ({found['accuracy']:.4f})", f"{bound}{found['seconds']:.1f}"]
            cells += [f"{bound}{found['seconds'] / recipe['seconds']:.2f}"]
        print(f"| {' | '.join([*cells, load()])} |", flush=True)


def inputs(bench: Bench) -> None:
    """Print the app's samples per second with --input memory and --input loader, and whether the losses are equal."""
    print("| ranks | memory | loader, 2 workers | memory / loader | losses | load |\n|---|---|---|---|---|---|")
    warm_up, steps = (1, 2) if bench.options.quick else (20, 100)
    for n in bench.options.ranks:
        speeds: dict[str, list[float]] = {"memory": [], "loader": []}
        losses = {}
        for _ in range(bench.options.repeats):
            for way, found in speeds.items():
                words = [f"--input={way}", "--workers=2", f"--max-steps={warm_up + steps}", "--log-every=1"]
                lines = bench.lines(n, f"--global-batch-size={BATCH}", *words)
                losses[way] = [line["loss"] for line in lines]
                found.append(steps * BATCH / (lines[-1]["seconds"] - lines[warm_up - 1]["seconds"]))
        ratio = statistics.median(a / b for a, b in zip(*speeds.values()))
        cells = [str(n), *(f"{statistics.median(found):,.0f}" for found in speeds.values()), f"{ratio:.2f}"]
        cells += ["equal" if losses["memory"] == losses["loader"] else "NOT EQUAL", load()]
        print(f"| {' | '.join(cells)} |", flush=True)


def machine(python: str) -> str:
    """Return the machine and the versions of the packages as text."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    flags = {name.strip(): value for name, value in fields.items()}.get("flags", "").split()
    fast = [flag for flag in flags if flag in ("avx512f", "avx512_bf16", "amx_bf16")]
    code = "import torch; from importlib.metadata import version; print(torch.__version__, version('torchvision'))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout.split()
    cores = len(os.sched_getaffinity(0))
    kind = f"{platform.machine()}, {' '.join(fast) or 'no AVX-512'}, {cores} cores, cores / ranks threads a rank"
    return f"{kind}; torch {said[0]}, torchvision {said[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=counts, default="1,2", help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=2, help="default: %(default)s")
    parser.add_argument("--target", type=float, default=0.9, help="test accuracy (default: %(default)s)")
    parser.add_argument("--evaluate-every", type=at_least(1), default=100, help="steps (default: %(default)s)")
    parser.add_argument("--cap", type=float, default=6, help="times the app's seconds (default: %(default)s)")
    parser.add_argument(
        "--workers", type=at_least(0), default=2, help="of the textbook's DataLoaders (default: %(default)s)"
    )
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data", help="default: %(default)s")
    parser.add_argument("--augment", action="store_true", help="crops and flips for both, and 2 epochs for the app")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shares", action="store_true", help="take each setting away instead")
    what.add_argument("--inputs", action="store_true", help="compare the app's two inputs instead")
    parser.add_argument("--quick", action="store_true", help="4 steps of everything, once: that it still runs")
    options = parser.parse_args()
    if options.quick:
        options.ranks = [2]
        options.repeats = 1
        options.evaluate_every = 2
        options.target = 0.05
    python = environment()
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(143))  # SystemExit makes `run` stop its job
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        unpack(options.data_dir, Path(name), python)
        print(f"{machine(python)}; test accuracy {options.target}, load before: {load()}\n", flush=True)
        (shares if options.shares else inputs if options.inputs else compare)(Bench(options, Path(name), python))
    print(f"\n{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
