"""Compare training at several ranks with training at 1 rank, for Accelerate, Lightning and cifar_ddp.

    bash scripts/test.sh -e elsewhere       # makes the environment, and draws docs/same_step_elsewhere

All programs, except in rows with "plain", train the same network from the same initial weights. They train on 1,024
images of synthetic-cifar10, with 256 images as the test set. The programs have the same seed, global batch and number
of updates, with two micro-batches per update. The training has batch normalization, dropout, crops and flips, label
smoothing, clipping, SGD and a cosine schedule. The libraries' programs divide the batch by the number of ranks, as
their guides recommend. The script then compares each program with itself at 1 rank. It compares the loss of each update
(the mean over the samples of all ranks), the samples of each update, the learning rates, and the reported accuracy.

The libraries' programs are elsewhere/*_loop.py, which follow the libraries' guides. They compute in float64, so that
rounding causes no difference. The programs of rows with "switches" set the library's options that make several ranks
more similar to one rank. The programs of rows with "plain" train without batch normalization, dropout and augmentation,
so that the model causes no difference. ``--output NAME`` writes the table between the two marks of NAME.md, and draws
NAME.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOOPS = ROOT / "benchmarks" / "elsewhere"
LIMIT = 600  # timeout of each run, in seconds
EXAMPLES = 1024
SEED = 1
LR = 0.02
EPOCHS = 2
BATCH = 48
ACCUMULATE = 2
MARKS = ("<!-- measured by benchmarks/same_step_elsewhere.py -->", "<!-- end of what was measured -->")


@dataclass(frozen=True)
class Program:
    """A program and its options, which make one row. The picture has a panel of losses if ``drawn``."""

    name: str
    kind: str
    options: tuple[str, ...] = ()
    drawn: bool = False


PROGRAMS = (
    Program("Accelerate, its guide", "accelerate", (), drawn=True),
    Program("Accelerate, switches", "accelerate", ("--switches",)),
    Program("Accelerate, switches, plain", "accelerate", ("--switches", "--plain")),
    Program("Lightning, its guide", "lightning", (), drawn=True),
    Program("Lightning, switches", "lightning", ("--switches",)),
    Program("Lightning, switches, plain", "lightning", ("--switches", "--plain")),
    Program("cifar_ddp", "cifar_ddp", ("--dtype=float64",), drawn=True),
    Program("cifar_ddp, float32", "cifar_ddp", ("--dtype=float32",)),
)


@dataclass(frozen=True)
class Update:
    """One update of all ranks, with the samples' mean loss, the samples' indices, and the learning rate if recorded."""

    loss: float
    samples: list[int]  # sorted, with repetitions
    lr: float | None = None


@dataclass(frozen=True)
class Training:
    """One program's run at one world size. ``examples`` is the number of test examples that the evaluation counted."""

    updates: list[Update]
    accuracy: float
    examples: int


def start(command: list[str], folder: Path, n: int) -> None:
    """Run a command to its end. If it fails, exit with its output. After an exception, stop the command first."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // n)),  # the default of the launch scripts
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(str(each) for each in (ROOT / "core", ROOT / "benchmarks" / "loops", LOOPS)),
    }
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        except BaseException as error:  # also KeyboardInterrupt
            os.killpg(process.pid, signal.SIGTERM)  # torchrun and the launch script forward TERM to their ranks
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        if process.returncode:
            output.seek(0)
            sys.exit(f"error: {' '.join(command)} ended with {process.returncode}: {output.read()[-3000:]}")


def theirs(program: Program, n: int, folder: Path) -> Training:
    """Train with Accelerate or Lightning, and return the merged records of the ranks.

    torchrun starts the ranks of Accelerate, because Accelerate's launcher needs MPI to start several ranks on CPU.
    Lightning starts its ranks itself.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={n}"]
    command = [sys.executable, *(launcher if program.kind == "accelerate" else ())]
    setting = [f"--batch={BATCH}", f"--accumulate={ACCUMULATE}", f"--epochs={EPOCHS}", f"--lr={LR}", f"--seed={SEED}"]
    loop = str(LOOPS / f"{program.kind}_loop.py")
    start([*command, loop, f"--ranks={n}", *setting, f"--out={folder}", *program.options], folder, n)
    return merge([json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(n)])


def merge(records: list[dict[str, Any]]) -> Training:
    """Return a `Training`, in which the ranks' micro-batches are merged into updates."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        for part in record["trained"]:
            parts.setdefault(part["update"], []).append(part)
    updates = []
    for _, those in sorted(parts.items()):
        samples = sorted(index for part in those for index in part["indices"])
        loss = sum(part["loss"] * len(part["indices"]) for part in those) / len(samples)
        updates.append(Update(loss, samples, those[0]["lr"]))
    return Training(updates, records[0]["accuracy"], records[0]["examples"])


def ours(program: Program, n: int, folder: Path) -> Training:
    """Train cifar_ddp by its launch script, from the other programs' initial weights, and return the run."""
    from samestep.sharding import GlobalBatches

    dtype = program.options[0].removeprefix("--dtype=")
    weights = folder / "initial.safetensors"
    start([sys.executable, str(LOOPS / "initial_weights.py"), str(SEED), dtype, str(weights)], folder, n)
    setting = [f"--global-batch-size={BATCH}", f"--accumulate={ACCUMULATE}", f"--epochs={EPOCHS}", f"--lr={LR}"]
    setting += [f"--seed={SEED}", "--dropout=0.1", "--label-smoothing=0.1", "--clip-norm=1", "--device=cpu"]
    setting += ["--dataset=synthetic-cifar10", f"--init-from={weights}", "--log-every=1", "--checkpoint-every=0"]
    script = ["bash", str(ROOT / "scripts" / "run_cifar_ddp.sh"), str(n), f"--run-dir={folder / 'run'}", "--quiet"]
    start([*script, *setting, *program.options], folder, n)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    shards = [GlobalBatches(EXAMPLES, BATCH, SEED, rank, n) for rank in range(n)]
    samples = [sorted(int(i) for each in shards for i in each.indices(step)) for step in range(len(losses))]
    result = json.loads((folder / "run" / "result.json").read_text())
    # cifar_ddp does not log its learning rate, which depends on the step alone.
    updates = [Update(*pair) for pair in zip(losses, samples)]
    return Training(updates, result["test_accuracy"], result["test_examples"])


def measure(program: Program, ranks: list[int]) -> dict[int, Training]:
    """Run a program at each world size in ``ranks``, and return the runs by world size."""
    found = {}
    for n in ranks:
        with tempfile.TemporaryDirectory() as folder:
            found[n] = (ours if program.kind == "cifar_ddp" else theirs)(program, n, Path(folder))
    return found


def write(path: Path, about: str, measured: dict[str, dict[int, Training]]) -> None:
    programs = {name: {n: asdict(each) for n, each in found.items()} for name, found in measured.items()}
    path.write_text(json.dumps({"machine": about, "programs": programs}))


def read(path: Path) -> tuple[str, dict[str, dict[int, Training]]]:
    """Return the machine and the runs from a file that `write` wrote."""
    stored = json.loads(path.read_text())

    def training(run: dict[str, Any]) -> Training:
        return Training([Update(**each) for each in run["updates"]], run["accuracy"], run["examples"])

    programs = {name: {int(n): training(run) for n, run in runs.items()} for name, runs in stored["programs"].items()}
    return stored["machine"], programs


def differences(one: Training, other: Training) -> list[float]:
    """Return the relative difference of each update's loss between the run ``one`` at 1 rank and the run ``other``.

    Raises:
        ValueError: the two runs have different numbers of updates.
    """
    if len(one.updates) != len(other.updates):
        raise ValueError(f"{len(one.updates)} updates at 1 rank, but {len(other.updates)}")
    return [abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(one.updates, other.updates)]


def alike(one: Training, other: Training) -> int:
    """Return the number of updates before the first update whose loss differs by more than a millionth from 1 rank."""
    found = differences(one, other)
    return next((k for k, each in enumerate(found) if each > 1e-6), len(found))


def rate_difference(one: Training, other: Training) -> str:
    """Return the largest difference of an update's learning rates as text, relative to the largest rate at 1 rank."""
    pairs = [(a.lr, b.lr) for a, b in zip(one.updates, other.updates)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return "not logged"
    difference = max(abs(a - b) for a, b in known) / max(a for a, _ in known)
    if difference > 1e-12:
        return f"{difference:.1%}"
    return "same"


def same_samples(one: Training, other: Training) -> int:
    """Return the number of updates that have the same samples as at 1 rank, with the same repetitions."""
    return sum(a.samples == b.samples for a, b in zip(one.updates, other.updates))


def repeated(training: Training) -> int:
    """Return the number of samples beyond one pass over the dataset per epoch, summed over all epochs."""
    length = len(training.updates) // EPOCHS
    epochs = [training.updates[k * length : (k + 1) * length] for k in range(EPOCHS)]
    return sum(sum(Counter(i for u in epoch for i in u.samples).values()) - EXAMPLES for epoch in epochs)


def row(name: str, found: dict[int, Training]) -> str:
    """Return a line of the table. ``found`` has the runs by number of ranks, including 1."""
    one = found[1]
    others = [found[n] for n in sorted(found) if n > 1]
    every = [found[n] for n in sorted(found)]
    cells = [
        name,
        ", ".join(f"{max(differences(one, each)):.1e}" for each in others),
        ", ".join(f"{alike(one, each)}" for each in others) + f" of {len(one.updates)}",
        ", ".join(f"{same_samples(one, each)}" for each in others) + f" of {len(one.updates)}",
        ", ".join(f"{repeated(each)}" for each in others),
        ", ".join(rate_difference(one, each) for each in others),
        ", ".join(f"{each.accuracy:.3f}" for each in every),
        ", ".join(f"{each.examples}" for each in every),
    ]
    return f"| {' | '.join(cells)} |"


def table(measured: dict[str, dict[int, Training]]) -> str:
    ranks = sorted(next(iter(measured.values())))
    those, every = (", ".join(str(n) for n in each) for each in (ranks[1:], ranks))
    head = ["program", f"losses at {those} ranks differ by", "first updates with the same loss, to 1e-6"]
    head += ["updates with the same samples", "samples repeated in training", "learning rate differs by"]
    head += [f"test accuracy at {every}", "test examples counted"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(row(*each) for each in measured.items())]
    return "\n".join(lines)


def machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("accelerate", "lightning", "torch", "torchvision"))
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, gloo; Python {platform.python_version()}, {packages}"


def draw(measured: dict[str, dict[int, Training]], path: Path) -> None:
    """Draw the picture of the losses.

    Each program with ``drawn`` has a panel with its losses. The last panel has each program's relative differences
    between the losses at the largest world size and at 1 rank.
    """
    import matplotlib.pyplot as plt

    panels = [program for program in PROGRAMS if program.drawn]
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(13, 3.4), constrained_layout=True)
    losses = [u.loss for program in panels for found in measured[program.name].values() for u in found.updates]
    limits = min(losses) - 0.05, max(losses) + 0.05
    for panel, program in zip(axes, panels):
        for k, (n, training) in enumerate(sorted(measured[program.name].items())):
            steps = range(1, len(training.updates) + 1)
            curve = [update.loss for update in training.updates]
            panel.plot(steps, curve, label=f"{n} rank{'s' * (n > 1)}", color=f"C{k}", linewidth=4 - 1.4 * k)
        panel.set(title=program.name, xlabel="update", ylim=limits)
        panel.legend(fontsize=8)
    axes[0].set_ylabel("loss of the global batch")
    most = max(next(iter(measured.values())))
    for k, (name, found) in enumerate(measured.items()):
        shown = [max(each, 1e-17) for each in differences(found[1], found[most])]
        style = "-" if any(program.name == name and program.drawn for program in PROGRAMS) else ":"
        axes[-1].plot(range(1, len(shown) + 1), shown, style, label=name, color=f"C{k}", linewidth=1.2)
    axes[-1].set(title=f"{most} ranks: relative difference from 1", xlabel="update", yscale="log")
    axes[-1].set_ylim(1e-17, 10)
    figure.legend(*axes[-1].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=76)


def write_page(path: Path, measured: str) -> None:
    """Write ``measured`` between the marks of a page, or into a new page."""
    page = path.read_text() if path.exists() else "\n".join(MARKS) + "\n"
    before, found, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (found and end):
        sys.exit(f"error: {path} lacks the lines {MARKS[0]} and {MARKS[1]}: put them back, or name another --output")
    path.write_text(f"{before}{MARKS[0]}\n{measured}\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="3,4", help="beside 1 (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, metavar="NAME", help="write NAME.md, NAME.png (default: print the table)"
    )
    parser.add_argument("--json", type=Path, help="write all that was measured here, after each program")
    parser.add_argument("--from-json", type=Path, metavar="JSON", help="measure nothing, take an earlier run's --json")
    options = parser.parse_args()
    counts = [int(each) if each.isdecimal() else 0 for each in options.ranks.split(",")]
    if any(n < 2 or BATCH // ACCUMULATE % n for n in counts):
        sys.exit(f"error: --ranks {options.ranks}: theirs need divisors of {BATCH // ACCUMULATE} above 1, such as 3,4")
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # SystemExit makes `start` stop the ranks
    if options.from_json and not options.from_json.is_file():
        sys.exit(
            f"error: --from-json {options.from_json}: no such file; leave it out to measure, or name one of --json"
        )
    if options.from_json:
        about, measured = read(options.from_json)
    else:
        about = machine()
        measured = {}
        for program in PROGRAMS:
            measured[program.name] = measure(program, sorted({1, *counts}))
            print(row(program.name, measured[program.name]), file=sys.stderr, flush=True)
            if options.json:
                write(options.json, about, measured)
    print(table(measured))
    if options.output:
        write_page(options.output.with_suffix(".md"), f"{table(measured)}\n\n{about}.")
        draw(measured, options.output.with_suffix(".png"))
    print(f"\n{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
