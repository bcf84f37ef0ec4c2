"""Compare the samples per second of the apps, of tutorials' loops, of other libraries, and of the compute limit.

    python3.11 benchmarks/throughput.py                        # measure all; takes hours on 2 cores
    python3.11 benchmarks/throughput.py --apps mnist_ddp --ranks 1,2 --rounds 3
    python3.11 benchmarks/throughput.py --apps mnist_ddp --contestants app,limit

The variants (--contestants) take turns on the same machine, in several rounds. They have the same model, global batch,
number of steps, images, and threads per rank. The images are 60,000 digits (the embedded digits, repeated). For
cifar_ddp, they are 50,000 images of synthetic-cifar10 (repeated), which all variants crop and flip. The times exclude
start-up, the first steps, evaluation and checkpoints.

- *textbook*: the training loop of the framework's own tutorial or example (loops/textbook_ddp.py, loops/<app>.py). The
  loop has per-sample transforms, DistributedSampler, and a DataLoader with 0 or 2 workers, whichever is faster.
  Paddle's loader has no workers, because it aborts with workers.

- *accelerate*, *lightning*: the same layers, dataset and workers through Accelerator.prepare and through Lightning's
  Trainer (loops/accelerate_loop.py, loops/lightning_loop.py).

- *app*: the app as its launch script starts it, with its default model and optimizer, timed by its own metrics.jsonl.

- *limit*: the app's own step on the app's first 32 batches, which are normalized in memory before the clock starts.
  This variant samples, logs and saves nothing.

- *plain-limit* (mnist_ddp): the limit with contiguous tensors and stock DDP and SGD, without this project's
  optimizations of the step.

- *fused-limit* (mnist_horovod): the limit with hvd.DistributedOptimizer and Horovod's own tensor fusion.

If a variant's fastest round is more than 1.3 times as fast as its slowest round, the script measures the row again. It
makes up to --attempts attempts. The table shows the attempt with the least spread, and the number of attempts.

The first run creates the environments .venvs/benchmark-<app>. PYTHON=/path/to/python selects another Python, which
needs matplotlib for --png, and the packages of accelerate and lightning. The script installs torchvision in a separate
folder, which only the loops use, because torchvision's import needs a fix beside a CPU torch.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import at_least, counts

ROOT = Path(__file__).resolve().parents[1]
LOOPS = ROOT / "benchmarks" / "loops"
WINDOW = 10  # steps between two lines of metrics.jsonl (the apps' default)
LIMIT = 900  # timeout of each run, in seconds
SPREAD = 1.3  # largest accepted ratio of a variant's fastest round to its slowest round
TORCHVISION = ("torchvision==0.28.0", "pillow==13.0.0")
MATPLOTLIB = "matplotlib==3.11.2"
# Never use pytorch-lightning 2.6.2 or 2.6.3, which were malicious.
PEERS = {"accelerate": "accelerate==1.15.0", "lightning": "pytorch-lightning==2.6.6"}
LOADERS = ("textbook", *PEERS)  # variants that have a DataLoader


@dataclass(frozen=True)
class Row:
    """An app, and the programs of loops/ that the script compares with the app."""

    launcher: tuple[str, ...]  # words of the command; {n} is the number of ranks, {folder} a temporary folder
    batch: int  # samples of a global batch
    textbook: str  # name of the baseline loop's program
    limit: str  # name of the program for the compute limit
    contestants: tuple[str, ...] = ("textbook", "app", "limit")
    dataset: str = "mnist"
    torchvision: bool = True  # whether the loops need torchvision from its separate folder
    workers: tuple[int, ...] = (0, 2)  # possible numbers of DataLoader workers; a loop uses the fastest number


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={n}")
HOROVODRUN = ("-m", "horovod.runner.launch", "--gloo", "-np", "{n}", "--disable-cache", "{python}")
PADDLE = ("-m", "paddle.distributed.launch", "--nproc_per_node={n}", "--host=127.0.0.1", "--log_dir={folder}/log")
APPS = {
    "mnist_ddp": Row(TORCHRUN, 128, "textbook_ddp", "mnist_ddp", ("textbook", *PEERS, "app", "limit", "plain-limit")),
    "cifar_ddp": Row(
        TORCHRUN, 128, "textbook_ddp", "cifar_ddp", ("textbook", *PEERS, "app", "limit"), "cifar10", torchvision=False
    ),
    "mnist_horovod": Row(
        HOROVODRUN,
        128,
        "mnist_horovod",
        "mnist_horovod",
        ("textbook", "app", "limit", "fused-limit"),
    ),
    "mnist_lightning": Row(TORCHRUN, 128, "lightning_loop", "mnist_ddp"),  # the step without a Trainer
    # Paddle's DataLoader aborts (SIGABRT) with workers.
    "lenet_paddle": Row(PADDLE, 64, "lenet_paddle", "lenet_paddle", torchvision=False, workers=(0,)),
}
CONTESTANTS = tuple(dict.fromkeys(contestant for row in APPS.values() for contestant in row.contestants))


def environment(app: str) -> str:
    """Return the path of the Python that runs ``app`` and the loops. Create its environment if it is missing."""
    if "PYTHON" in os.environ:
        return os.environ["PYTHON"]
    folder = ROOT / ".venvs" / f"benchmark-{app}"
    python = str(folder / "bin" / "python")
    ready = folder / "ready"
    pins = ROOT / "apps" / app / "requirements.in"
    beside = [MATPLOTLIB, *(package for peer, package in PEERS.items() if peer in APPS[app].contestants)]
    wanted = "\n".join([pins.read_text(), *beside])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"-r{pins}", *beside], check=True)
        setup = ROOT / "apps" / app / "setup.sh"
        if setup.exists():
            subprocess.run(["bash", str(setup), python], check=True)
        ready.write_text(wanted)
    return python


def torchvision(python: str) -> Path:
    """Return torchvision's folder, or LOOPS, which is on the path anyway, if ``python`` has torchvision."""
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0:
        return LOOPS
    folder = ROOT / ".venvs" / "benchmark-torchvision"
    if not (folder / "ready").exists():
        print(f"making {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", *TORCHVISION]
        subprocess.run(install, check=True)
        (folder / "ready").touch()
    return folder


def write_digits(folder: Path, python: str) -> None:
    """Write the embedded digits, repeated to 60,000 training digits, as IDX files for torchvision and the apps."""
    code = (
        "import sys; from pathlib import Path; import numpy as np; from samestep.data import datasets, files\n"
        "found = datasets.load('mnist-5k', Path('.')); raw = Path(sys.argv[1])\n"
        "for split, times in (('train', 15), ('t10k', 10)):\n"
        "    name = 'train' if split == 'train' else 'test'\n"
        "    for kind, array in (('images-idx3', getattr(found, name + '_images')),\n"
        "                        ('labels-idx1', getattr(found, name + '_labels'))):\n"
        "        array = np.concatenate([array.astype(np.uint8)] * times)\n"
        "        sizes = b''.join(size.to_bytes(4, 'big') for size in array.shape)\n"
        "        content = (2048 + array.ndim).to_bytes(4, 'big') + sizes + array.tobytes()\n"
        "        (raw / f'{split}-{kind}-ubyte').write_bytes(content)\n"
    )
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "core")}
    subprocess.run([python, "-c", code, str(raw)], check=True, env=environ, cwd=folder)
    for path in list(raw.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1, mtime=0))


def write_cifar(folder: Path, python: str) -> None:
    """Write synthetic-cifar10 in CIFAR-10's binary format, repeated to 50,000 training and 10,000 test images."""
    code = (
        "import sys; from pathlib import Path; import numpy as np; from samestep.data import datasets, files\n"
        "found = datasets.load('synthetic-cifar10', Path('.')); raw = Path(sys.argv[1])\n"
        "for split, names in (('train', files.CIFAR_FILES[:5]), ('test', files.CIFAR_FILES[5:])):\n"
        "    images, labels = getattr(found, split + '_images'), getattr(found, split + '_labels')\n"
        "    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)\n"
        "    records = np.concatenate([labels[:, None], planes], axis=1).astype(np.uint8)\n"
        "    for i, name in enumerate(names):\n"
        "        chosen = np.arange(10_000 * i, 10_000 * (i + 1)) % len(records)\n"
        "        (raw / name).write_bytes(records[chosen].tobytes())\n"
    )
    raw = folder / "cifar-10-batches-bin"
    raw.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "core")}
    subprocess.run([python, "-c", code, str(raw)], check=True, env=environ, cwd=folder)


def run(command: list[str], folder: Path, n: int, python: str, *path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, cores // n)),  # the default of the launch scripts
        "PYTHON": python,
        "PYTHONPATH": os.pathsep.join(str(each) for each in (ROOT / "core", LOOPS, *path)),
    }
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")


def speed(app: str, contestant: str, n: int, workers: int, data: Path, options: argparse.Namespace) -> float:
    """Run a contestant once, and return the samples per second of the timed steps.

    Args:
        app: name of the app, a key of APPS.
        contestant: name of the variant, one of CONTESTANTS.
        n: number of ranks.
        workers: number of workers of the variant's DataLoader.
        data: folder with the images that `write_data` writes.
        options: options of this script, such as the number of steps.
    """
    row = APPS[app]
    python = environment(app)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if contestant == "app":
            script = ["bash", str(ROOT / "scripts" / f"run_{app}.sh"), str(n), f"--run-dir={folder / 'run'}"]
            steps = options.warm_up + options.steps
            those = [f"--dataset={row.dataset}", f"--data-dir={data}", f"--max-steps={steps}", "--checkpoint-every=0"]
            run([*script, *those, f"--global-batch-size={row.batch}", f"--device={options.device}"], folder, n, python)
            lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
            timed = [line for line in lines if line.get("step", 0) > options.warm_up]
            assert len(timed) == options.steps // WINDOW, timed
            return len(timed) / sum(1 / float(line["samples_per_second"]) for line in timed)
        launcher = [part.format(n=n, folder=folder, python=python) for part in row.launcher]
        loops = {"textbook": row.textbook, **{peer: f"{peer}_loop" for peer in PEERS}}
        loop = loops.get(contestant, row.limit)
        out = folder / "speed.json"
        arguments = [contestant, f"--data={data}", f"--batch={row.batch}", f"--out={out}", f"--workers={workers}"]
        arguments += [f"--task={row.dataset}", f"--warm-up={options.warm_up}", f"--steps={options.steps}"]
        arguments += [f"--device={options.device}"]
        needed = [torchvision(python)] if contestant in LOADERS and row.torchvision else []
        run([python, *launcher, str(LOOPS / f"{loop}.py"), *arguments], folder, n, python, *needed)
        return float(json.loads(out.read_text()))


Speeds = dict[str, list[float]]  # samples per second in each round, by variant


def spread(speeds: Speeds) -> float:
    """Return the largest ratio of a variant's fastest round to the variant's slowest round."""
    return max(max(values) / min(values) for values in speeds.values())


def steadiest(attempt: Callable[[], Speeds], attempts: int) -> tuple[Speeds, int]:
    """Repeat up to ``attempts`` times, until the spread is at most SPREAD.

    Returns:
        The attempt of least spread, and the number of attempts.
    """
    tried: list[Speeds] = []
    while not tried or (spread(tried[-1]) > SPREAD and len(tried) < attempts):
        tried.append(attempt())
    return min(tried, key=spread), len(tried)


def measure(app: str, n: int, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one app at one number of ranks, and return the attempt of the least spread.

    Args:
        app: name of the app, a key of APPS.
        n: number of ranks.
        data: folder with the images that `write_data` writes.
        options: options of this script, such as the number of rounds.
    """
    contestants = [each for each in APPS[app].contestants if each in options.contestants]
    workers = {contestant: 0 for contestant in contestants if contestant in LOADERS}
    choice = APPS[app].workers
    if len(choice) > 1 and not options.quick:
        for contestant in workers:
            first = {count: speed(app, contestant, n, count, data, options) for count in choice}
            workers[contestant] = max(first, key=lambda count: first[count])

    def attempt() -> Speeds:
        found: Speeds = {contestant: [] for contestant in contestants}
        for _ in range(options.rounds):
            for contestant, speeds in found.items():
                speeds.append(speed(app, contestant, n, workers.get(contestant, 0), data, options))
        return found

    best, attempts = steadiest(attempt, options.attempts)
    return {"app": app, "ranks": n, "workers": workers, "speeds": best, "spread": spread(best), "attempts": attempts}


def shown(values: list[float], digits: int = 0) -> str:
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratios(result: dict[str, Any], other: str) -> list[float]:
    """Return the app's speed divided by another variant's speed, for each round."""
    return [ours / theirs for ours, theirs in zip(result["speeds"]["app"], result["speeds"][other])]


def cell(result: dict[str, Any], contestant: str) -> str:
    """Return a variant's speed, its workers, and the app's relative speed as text; "" if the variant did not run."""
    speeds = result["speeds"]
    if contestant not in speeds:
        return ""
    parts = [shown(speeds[contestant])]
    if contestant in result["workers"]:
        parts.append(f"{result['workers'][contestant]} workers")
    if contestant != "app" and "app" in speeds:
        parts.append(f"**{shown(ratios(result, contestant), 2)}**")
    return "; ".join(parts)


def table(result: dict[str, Any], columns: list[str]) -> str:
    cells = [result["app"], str(result["ranks"]), *(cell(result, contestant) for contestant in columns)]
    cells += [f"{result['spread']:.2f}", str(result["attempts"])]
    return f"| {' | '.join(cells)} |"


def head(columns: list[str]) -> str:
    names = ["app", "ranks", *columns, "spread", "attempts"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def machine(apps: list[str]) -> str:
    """Return the machine and the versions of the packages as text."""
    versions = []
    for app in apps:
        lines = (ROOT / "apps" / app / "requirements.in").read_text().splitlines()
        versions += [line for line in lines if line.startswith(("torch==", "paddle", "pytorch-lightning"))]
        versions += [package for peer, package in PEERS.items() if peer in APPS[app].contestants]
    threads = "threads a rank: cores / ranks, at least 1"
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, {threads}; Python {platform.python_version()}, " + ", ".join(
        sorted(set(versions))
    )


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draw bars of the median samples per second with the range of the rounds. This function needs matplotlib."""
    import matplotlib.pyplot as plt

    results = measured["results"]
    names = {
        "textbook": ("textbook loop", "0.75"),
        "accelerate": ("Accelerate", "C1"),
        "lightning": ("Lightning", "C4"),
        "app": ("this app", "C0"),
        "limit": ("compute limit", "C2"),
        "plain-limit": ("plain limit", "C8"),
        "fused-limit": ("limit with tensor fusion", "C9"),
    }
    width = 0.9 / len(names)
    figure, axes = plt.subplots(figsize=(11, 3.8), constrained_layout=True)
    for i, (contestant, (label, colour)) in enumerate(names.items()):
        places = []
        medians = []
        below = []
        above = []
        for j, result in enumerate(results):
            values = result["speeds"].get(contestant)
            if values:
                middle = statistics.median(values)
                places.append(j + (i - (len(names) - 1) / 2) * width)
                medians.append(middle)
                below.append(middle - min(values))
                above.append(max(values) - middle)
        if not places:
            continue
        axes.bar(places, medians, width, yerr=(below, above), label=label, color=colour, error_kw={"lw": 0.8})
    ticks = [f"{result['app']}\n{result['ranks']} rank{'s' * (result['ranks'] > 1)}" for result in results]
    axes.set_xticks(range(len(results)), ticks, fontsize=8)
    axes.set(ylabel="samples per second", title=measured["machine"])
    axes.title.set_fontsize(8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    """Return the options, with ``apps`` and ``contestants`` as lists. Exit if an option is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apps", default=",".join(APPS), help="default: %(default)s")
    parser.add_argument("--ranks", type=counts, default="1,2,4", help="default: %(default)s")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="those of each app (default: %(default)s)")
    device = "cuda: mnist_ddp's textbook, app and limit alone (default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=device)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="default: %(default)s")
    parser.add_argument(
        "--attempts", type=at_least(1), default=3, help=f"at a spread below {SPREAD} (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up", type=at_least(0), default=20, help="steps before those timed (default: %(default)s)"
    )
    parser.add_argument("--steps", type=at_least(1), default=200, help="steps timed, in tens (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures here, after each line of the table")
    parser.add_argument("--png", type=Path, help="draw them here")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing, draw an earlier run's --json")
    parser.add_argument("--quick", action="store_true", help="one round of 10 steps at 2 ranks: that it still runs")
    options = parser.parse_args()
    if options.draw and not options.draw.is_file():
        sys.exit(f"error: --draw {options.draw}: no such file; name a file that --json wrote")
    if options.draw and not options.png:
        sys.exit("error: --draw: name the picture with --png")
    if options.quick:
        options.ranks = [2]
        options.rounds = 1
        options.warm_up = 10
        options.steps = 10
    options.apps = chosen("--apps", options.apps, APPS)
    options.contestants = chosen("--contestants", options.contestants, CONTESTANTS)
    for app in options.apps:
        own = APPS[app].contestants
        if not set(options.contestants) & set(own):
            sys.exit(f"error: --contestants {','.join(options.contestants)}: {app} has {', '.join(own)}")
    if options.warm_up % WINDOW or options.steps % WINDOW:
        sys.exit(f"error: --warm-up and --steps must be multiples of {WINDOW}")
    return options


def chosen(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list. Exit with an error if a name is not in ``known``."""
    names = text.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"error: {option} {','.join(unknown)}: choose from {', '.join(known)}")
    return names


def write_data(folder: Path, apps: Sequence[str]) -> None:
    """Write the images of the apps' datasets into a folder."""
    python = environment(apps[0])
    write_digits(folder, python)
    if any(APPS[app].dataset == "cifar10" for app in apps):
        write_cifar(folder, python)


def main() -> None:
    options = parse()
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.png)
        return
    columns = [each for each in CONTESTANTS if each in options.contestants]
    columns = [each for each in columns if any(each in APPS[app].contestants for app in options.apps)]
    measured: dict[str, Any] = {"machine": machine(options.apps), "results": []}
    print(f"{measured['machine']}; {options.rounds} rounds of {options.steps} steps, samples per second; ", end="")
    print(f"in bold how many times as fast the app is\n\n{head(columns)}", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        write_data(data, options.apps)
        for app, n in itertools.product(options.apps, options.ranks):
            result = measure(app, n, data, options)
            measured["results"].append(result)
            print(table(result, columns), flush=True)
            if options.json:
                options.json.write_text(json.dumps(measured, indent=1))
        if options.png:
            source = data / "measured.json"
            source.write_text(json.dumps(measured))
            drawing = [environment(options.apps[0]), __file__, f"--draw={source}", f"--png={options.png}"]
            subprocess.run(drawing, check=True)
    print(f"\n{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
