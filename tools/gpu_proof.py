"""Prove the PyTorch apps on one device, and write the results to one JSON file.

    PYTHON=python3 bash tools/gpu_proof.sh --output gpu_proof.json --mnist DIR     # one NVIDIA GPU, NCCL, one rank
    PYTHON=python3 bash tools/gpu_proof.sh --device cpu --quick                    # the same in short, without a GPU

The interpreter needs what the apps pin (other versions are a warning) and no package index. DIR holds MNIST's four
files. Each row ends with `passed`, `failed` with the reason, or `not run` with the reason; only `passed` is a pass.

- losses: The first losses on the device equal the CPU's (gloo).
- recovery: SIGKILL to the rank, a restart, SIGTERM, a resume, and the weights of an undisturbed run to the bit.
- collectives: Each collective of collectives_lab, against its definition.
- speed: Samples per second of mnist_ddp, of its own step on batches that stay on the device, of the textbook loop.
- accuracy: Seconds until mnist_ddp has 99% of MNIST's test set.

Rows that measure no time run side by side, one for every 2 processors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 180.0  # seconds of any one run
MNIST = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
TARGET = 0.99
ERROR = re.compile(r"error: |(\[rank\d+\]: )?\w+(Error|Exception): ")
# Nothing is drawn at random on the device, because devices draw other numbers: dropout is off.
APPS: dict[str, list[str]] = {
    "mnist_ddp": ["--dataset=mnist-5k", "--dropout=0"],
    "mnist_lightning": ["--dataset=mnist-5k", "--dropout=0"],
    # A larger rate multiplies the rounding: at 0.1, float32 and float64 are 1e-3 apart on one CPU after 5 updates.
    "cifar_ddp": ["--dataset=synthetic-cifar10", "--dropout=0", "--lr=0.003"],
    "gpt_fsdp": ["--layers=2", "--width=64"],
}
STEPS, QUICK_STEPS = 1500, 40  # of the runs that are killed and stopped, and of those that are not
FLOAT32, BFLOAT16 = 1e-4, 2e-2  # bfloat16 has 8 bits, and a device sums in an order of its own
LOSSES: list[tuple[str, list[str], float]] = [
    ("mnist_ddp", [], FLOAT32),
    ("mnist_ddp", ["--backend=gloo"], FLOAT32),
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
        self.folder, self.device, self.quick, self.mnist, self._runs = folder, device, quick, mnist, itertools.count(1)
        self.steps = QUICK_STEPS if quick else STEPS
        self.options = ["--epochs=1000", f"--max-steps={self.steps}", f"--checkpoint-every={self.steps // 4}"]
        self.options.append("--log-every=1")
        self._undisturbed: dict[str, Path] = {}
        self._locks = {app: threading.Lock() for app in APPS}

    def new_run_dir(self) -> Path:
        return self.folder / f"run-{next(self._runs)}"

    def undisturbed(self, app: str) -> Path:
        """Return the run dir of a run that nothing happens to."""
        with self._locks[app]:
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
        raise RuntimeError(f"exit code {process.returncode}, not {code}: {last_error(errors)}")


def last_error(text: str) -> str:
    """Return the last line of ``text`` that names an error, or its last line."""
    lines = text.strip().splitlines() or [""]
    return ([line for line in lines if ERROR.match(line)] or lines)[-1]


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
        if process.poll() is not None:
            raise RuntimeError(f"step {step} was not reached: {last_error(process.communicate()[1])}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not reached in {LIMIT:.0f} s")
        time.sleep(0.02)


# --- rows --------------------------------------------------------------------------------------------------------


def losses(proof: Proof, app: str, options: Sequence[str], tolerance: float) -> dict[str, Any]:
    """Compare the first losses with the CPU's, which runs without torch.compile."""
    steps = 2 if proof.quick else 5
    common = [f"--max-steps={steps}", "--epochs=1000", "--log-every=1", "--checkpoint-every=0"]
    on_cpu = [each for each in options if each != "--compile"]
    with ThreadPoolExecutor() as pool:
        cpu = pool.submit(proof.run, app, *common, *on_cpu, run_dir=proof.new_run_dir(), device="cpu")
        run_dir = proof.run(app, *common, *options) if options else proof.undisturbed(app)
    here = [line["loss"] for line in metrics(run_dir)][:steps]
    there = [line["loss"] for line in metrics(cpu.result())]
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


def output_of(command: Sequence[str], limit: float) -> str:
    """Run a program to its end and return its output. Raises RuntimeError with its error."""
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(last_error(done.stderr))
    return done.stdout


def collectives(proof: Proof) -> dict[str, Any]:
    """Compare every collective of the device's backend with its definition, in collectives_lab."""
    command = ["bash", str(ROOT / "scripts" / "run_collectives_lab.sh"), "1", "primitives", "--quick"]
    command += [f"--run-dir={proof.new_run_dir()}", f"--device={proof.device}"]
    (line,) = [line for line in output_of(command, LIMIT).splitlines() if line.startswith("RESULT ")]
    return {"seconds": json.loads(line.removeprefix("RESULT "))["seconds"]}


def speed(proof: Proof) -> dict[str, Any]:
    """Measure mnist_ddp beside its own step on resident batches and beside the textbook loop."""
    output = proof.folder / "throughput.json"
    sizes = ["--rounds=1", "--warm-up=10", "--steps=20"] if proof.quick else ["--rounds=2", "--steps=200"]
    contestants = "app,limit" if proof.quick else "textbook,app,limit"
    command = [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), "--apps=mnist_ddp", "--ranks=1", *sizes]
    command += [f"--device={proof.device}", f"--contestants={contestants}", "--attempts=1", f"--json={output}"]
    output_of(command, 2 * LIMIT)
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


Row = tuple[str, Callable[[], Mapping[str, Any]]]  # the name and the function


def rows(proof: Proof) -> tuple[list[Row], list[Row]]:
    """Return the rows that may run side by side, and those that may not."""
    together: list[Row] = [
        (" ".join(["losses", app, *options]), partial(losses, proof, app, options, tolerance))
        for app, options, tolerance in (LOSSES[:1] if proof.quick else LOSSES)
    ]
    together += [(f"recovery {app}", partial(recovery, proof, app)) for app in (["mnist_ddp"] if proof.quick else APPS)]
    alone: list[Row] = [("speed mnist_ddp", partial(speed, proof))]
    if not proof.quick:
        together.append(("collectives collectives_lab", partial(collectives, proof)))
        alone.append(("accuracy mnist_ddp", partial(accuracy, proof)))
    return together, alone


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


def is_chosen(row: str, only: str | None) -> bool:
    return only is None or any(word in row for word in only.split(","))


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


def _short(value: Any) -> str:
    """Return ``value`` in JSON, a small number with two digits."""
    return f"{value:.1e}" if isinstance(value, float) and 0 < value < 1e-3 else json.dumps(value)


def table(seen: Mapping[str, Any]) -> str:
    """Return a Markdown table of the results."""
    where = ", ".join(f"{name} {value}" for name, value in seen["machine"].items())
    lines = [f"{where}; {seen['date']}", "", "| row | outcome | seconds | figures |", "|---|---|---|---|"]
    for row in seen["rows"]:
        figures = {name: value for name, value in row.items() if name not in ("row", "outcome", "seconds taken")}
        shown = ", ".join(f"{name} {_short(value)}" for name, value in figures.items() if name != "losses")
        lines.append(f"| {row['row']} | {row['outcome']} | {row['seconds taken']} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few rows and steps: that the proof itself still works")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder of MNIST's files, for the row accuracy")
    parser.add_argument("--output", type=Path, default=Path("gpu_proof.json"), help="default: %(default)s")
    parser.add_argument(
        "--only", metavar="WORDS", help="only rows with one of these, such as 'gpt_fsdp,speed'; keep others"
    )
    parser.add_argument("--table", type=Path, metavar="JSON", help="prove nothing; print an earlier output as a table")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    seen: dict[str, Any] = {"machine": machine(options.device), "date": time.strftime("%Y-%m-%d"), "rows": []}
    if options.only and options.output.exists():
        earlier = json.loads(options.output.read_text())
        if earlier["machine"] != seen["machine"]:
            sys.exit(f"error: {options.output} is of another machine, {earlier['machine']}: name another --output")
        seen["rows"] = earlier["rows"]

    def note(row: dict[str, Any]) -> None:
        kept = [each for each in seen["rows"] if each["row"] != row["row"]]
        seen["rows"] = sorted([*kept, row], key=lambda each: str(each["row"]))
        options.output.write_text(json.dumps(seen, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        proof = Proof(Path(name), options.device, options.quick, options.mnist and options.mnist.resolve())
        together, alone = ([row for row in part if is_chosen(row[0], options.only)] for part in rows(proof))
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            for done in as_completed([pool.submit(try_row, *row) for row in together]):
                note(done.result())
        for row in alone:
            note(try_row(*row))
    failed = [row["row"] for row in seen["rows"] if row["outcome"] != "passed"]
    print(f"{len(seen['rows']) - len(failed)} of {len(seen['rows'])} rows passed; see {options.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
