"""Prove the PyTorch apps on one device, and write the results to one JSON file.

    PYTHON=python3 bash tools/gpu_proof.sh --output gpu_proof.json --mnist DIR     # one NVIDIA GPU, NCCL, one rank
    PYTHON=python3 bash tools/gpu_proof.sh --device cpu --quick                    # the same in short, without a GPU

The interpreter needs what the apps pin (other versions are a warning) and no package index. DIR holds MNIST's four
files. Each row ends with `passed`, `failed` with the reason, or `not run` with the reason; only `passed` is a pass.

- losses: The first losses on the device equal the CPU's (gloo).
- recovery: SIGKILL to the rank, a restart, SIGTERM, a resume, and the weights of an undisturbed run to the bit.
- speed: Samples per second of mnist_ddp, of its own step on batches that stay on the device, of the textbook loop.
- accuracy: Seconds until mnist_ddp has 99% of MNIST's test set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 180.0  # seconds of any one run
MNIST = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
TARGET = 0.99
# Nothing is drawn at random on the device, because devices draw other numbers: dropout is off.
APPS: dict[str, list[str]] = {
    "mnist_ddp": ["--dataset=mnist-5k", "--dropout=0"],
    "mnist_lightning": ["--dataset=mnist-5k", "--dropout=0"],
    "cifar_ddp": ["--dataset=synthetic-cifar10", "--dropout=0"],
    "gpt_fsdp": ["--dropout=0", "--layers=2", "--width=64"],
}
STEPS, QUICK_STEPS = 400, 40  # of the runs that are killed and stopped, and of those that are not
FLOAT32, BFLOAT16 = 1e-4, 2e-2  # bfloat16 has 8 bits, and a device sums in an order of its own
LOSSES: list[tuple[str, list[str], float]] = [
    ("mnist_ddp", [], FLOAT32),
    ("mnist_lightning", [], FLOAT32),
    ("cifar_ddp", [], FLOAT32),
    ("cifar_ddp", ["--autocast=bfloat16"], BFLOAT16),
    ("cifar_ddp", ["--compile"], FLOAT32),
    ("gpt_fsdp", [], FLOAT32),
    ("gpt_fsdp", ["--autocast=bfloat16"], BFLOAT16),
]


class NotRun(Exception):
    """Say why a row cannot be tried."""


class Proof:
    """Runs of the apps in a temporary folder, on one device."""

    def __init__(self, folder: Path, device: str, quick: bool, mnist: Path | None) -> None:
        self.folder, self.device, self.quick, self.mnist, self._count = folder, device, quick, mnist, 0
        self.steps = QUICK_STEPS if quick else STEPS
        self.options = ["--epochs=100", f"--max-steps={self.steps}", f"--checkpoint-every={self.steps // 4}"]
        self.options.append("--log-every=1")
        self._undisturbed: dict[str, Path] = {}

    def new_run_dir(self) -> Path:
        self._count += 1
        return self.folder / f"run-{self._count}"

    def undisturbed(self, app: str) -> Path:
        """Return the run dir of a run that nothing happens to."""
        if app not in self._undisturbed:
            self._undisturbed[app] = self.run(app, *self.options)
        return self._undisturbed[app]

    @contextlib.contextmanager
    def start(self, app: str, run_dir: Path, options: Sequence[str], device: str) -> Iterator[subprocess.Popen[str]]:
        """Start an app's launch script with one rank; end it, and all that it started, when the context ends."""
        command = ["bash", str(ROOT / "scripts" / f"run_{app}.sh"), "1", *APPS[app], *options]
        environ = {**os.environ, "PYTHON": sys.executable, **({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})}
        pipe = subprocess.PIPE
        words = [*command, f"--run-dir={run_dir}", f"--device={device}"]
        process = subprocess.Popen(words, env=environ, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # the second one ends it at once
                if process.poll() is None:
                    process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.communicate(timeout=40)

    def run(self, app: str, *options: str, run_dir: Path | None = None, device: str = "") -> Path:
        """Run an app to its end and return its run dir. Raises RuntimeError with the script's error line."""
        run_dir = run_dir or self.new_run_dir()
        with self.start(app, run_dir, options, device or self.device) as process:
            wait_for_end(process, 0)
        return run_dir


def wait_for_end(process: subprocess.Popen[str], code: int) -> None:
    _, errors = process.communicate(timeout=LIMIT)
    if process.returncode != code:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        raise RuntimeError(f"exit code {process.returncode}, not {code}: {(lines or errors.splitlines() or [''])[-1]}")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl that have a step, also while the run writes its last line."""
    lines = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for text in (run_dir / "metrics.jsonl").read_text().splitlines():
            lines.append(json.loads(text))
    return [line for line in lines if "step" in line]


def result(run_dir: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return values


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT
    while not any(line["step"] >= step for line in metrics(run_dir)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not reached")
        time.sleep(0.02)


# --- rows --------------------------------------------------------------------------------------------------------


def losses(proof: Proof, app: str, options: Sequence[str], tolerance: float) -> dict[str, Any]:
    """Compare the first losses with the CPU's, which runs without torch.compile."""
    steps = 2 if proof.quick else 5
    common = [f"--max-steps={steps}", "--log-every=1", "--checkpoint-every=0"]
    run_dir = proof.run(app, *common, *options) if options else proof.undisturbed(app)
    here = [line["loss"] for line in metrics(run_dir)][:steps]
    on_cpu = [each for each in options if each != "--compile"]
    there = [line["loss"] for line in metrics(proof.run(app, *common, *on_cpu, device="cpu"))]
    difference = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(here, there))
    if not (len(here) == len(there) == steps and difference <= tolerance):
        raise RuntimeError(f"losses {here}, on the CPU {there}")
    return {"largest difference": difference, "tolerance": tolerance, "losses": here}


def recovery(proof: Proof, app: str) -> dict[str, Any]:
    """Kill a run, stop it once it has restarted, resume it, and compare its weights with an undisturbed run's."""
    undisturbed = result(proof.undisturbed(app))["weights_sha256"]
    run_dir = proof.new_run_dir()
    with proof.start(app, run_dir, proof.options, proof.device) as process:
        wait_for_step(process, run_dir, proof.steps // 3)
        os.kill(json.loads((run_dir / "log" / "alive-0").read_text())["pid"], signal.SIGKILL)
        wait_for_step(process, run_dir, 2 * proof.steps // 3)
        process.send_signal(signal.SIGTERM)
        wait_for_end(process, 128 + signal.SIGTERM)
    found = result(proof.run(app, *proof.options, run_dir=run_dir))
    if found["weights_sha256"] != undisturbed:
        raise RuntimeError(f"weights {found['weights_sha256'][:12]}, undisturbed {undisturbed[:12]}")
    starts = (run_dir / "metrics.jsonl").read_text().count('{"resumed": ')
    if starts != 2:
        raise RuntimeError(f"the run resumed {starts} times, not twice")
    return {"resumed from step": found["resumed_from_step"], "steps": proof.steps}


def speed(proof: Proof) -> dict[str, Any]:
    """Measure mnist_ddp beside its own step on resident batches and beside the textbook loop."""
    output = proof.folder / "throughput.json"
    sizes = ["--rounds=1", "--warm-up=10", "--steps=20"] if proof.quick else ["--rounds=3", "--steps=200"]
    contestants = "app,limit" if proof.quick else "textbook,app,limit"
    command = [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), "--apps=mnist_ddp", "--ranks=1", *sizes]
    command += [f"--device={proof.device}", f"--contestants={contestants}", "--attempts=1", f"--json={output}"]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    (measured,) = json.loads(output.read_text())["results"]
    return {"samples per second": measured["speeds"]}


def accuracy(proof: Proof) -> dict[str, Any]:
    """Measure the seconds of mnist_ddp, on MNIST, until an evaluation has TARGET; start-up is outside."""
    if proof.mnist is None or not all((proof.mnist / name).is_file() for name in MNIST):
        raise NotRun(f"no data: name a folder that has {', '.join(MNIST)} by --mnist")
    data = proof.folder / "data"
    (data / "mnist").mkdir(parents=True)
    for name in MNIST:
        (data / "mnist" / name).symlink_to((proof.mnist / name).resolve())
    options = ["--dataset=mnist", f"--data-dir={data}", "--epochs=10", "--global-batch-size=512", "--lr=0.1"]
    run_dir = proof.run("mnist_ddp", *options, "--dropout=0.25", "--evaluate-every=50", "--log-every=50")
    seconds = 0.0
    for before, line in zip([{"samples_seen": 0}, *metrics(run_dir)], metrics(run_dir)):
        seconds += (line["samples_seen"] - before["samples_seen"]) / line["samples_per_second"]
        if line.get("test_accuracy", 0.0) >= TARGET:
            return {"seconds": round(seconds, 2), "step": line["step"], "test accuracy": line["test_accuracy"]}
    raise RuntimeError(f"the best evaluation of 10 epochs had less than {TARGET}")


def rows(proof: Proof) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yield the name and the function of each row."""
    for app, options, tolerance in LOSSES[:1] if proof.quick else LOSSES:
        yield " ".join(["losses", app, *options]), partial(losses, proof, app, options, tolerance)
    for app in ["mnist_ddp"] if proof.quick else APPS:
        yield f"recovery {app}", partial(recovery, proof, app)
    yield "speed mnist_ddp", partial(speed, proof)
    if not proof.quick:
        yield "accuracy mnist_ddp", partial(accuracy, proof)


def try_row(name: str, call: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        outcome: dict[str, Any] = {"outcome": "passed", **call()}
    except NotRun as reason:
        outcome = {"outcome": f"not run: {reason}"}
    except Exception as error:
        outcome = {"outcome": f"failed: {type(error).__name__}: {error}"}
    outcome = {"row": name, **outcome, "seconds taken": round(time.monotonic() - begun, 1)}
    print(f"{name}: {outcome['outcome']} ({outcome['seconds taken']} s)", flush=True)
    return outcome


def machine(device: str) -> dict[str, Any]:
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cpu":
        return {**versions, "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"}
    if not torch.cuda.is_available():
        print("error: --device cuda: torch finds no GPU here: use --device cpu, or another machine", file=sys.stderr)
        sys.exit(2)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {**versions, "nccl": nccl, "device": torch.cuda.get_device_name(0)}


def table(seen: Mapping[str, Any]) -> str:
    """Return a Markdown table of the results."""
    where = ", ".join(f"{name} {value}" for name, value in seen["machine"].items())
    lines = [f"{where}; {seen['date']}", "", "| row | outcome | seconds | figures |", "|---|---|---|---|"]
    for row in seen["rows"]:
        figures = {name: value for name, value in row.items() if name not in ("row", "outcome", "seconds taken")}
        shown = ", ".join(f"{name} {json.dumps(value)}" for name, value in figures.items() if name != "losses")
        lines.append(f"| {row['row']} | {row['outcome']} | {row['seconds taken']} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few rows and steps: that the proof itself still works")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder of MNIST's files, for the row accuracy")
    parser.add_argument("--output", type=Path, default=Path("gpu_proof.json"), help="default: %(default)s")
    parser.add_argument("--table", type=Path, metavar="JSON", help="prove nothing; print an earlier output as a table")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    seen: dict[str, Any] = {"machine": machine(options.device), "date": time.strftime("%Y-%m-%d"), "rows": []}
    with tempfile.TemporaryDirectory() as name:
        proof = Proof(Path(name), options.device, options.quick, options.mnist and options.mnist.resolve())
        for row, call in rows(proof):
            seen["rows"].append(try_row(row, call))
            options.output.write_text(json.dumps(seen, indent=1) + "\n")
    failed = [row["row"] for row in seen["rows"] if row["outcome"] != "passed"]
    print(f"{len(seen['rows']) - len(failed)} of {len(seen['rows'])} rows passed; see {options.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
